"""Finds code of the user that the training needs and never runs: no record shows what is not called."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.judge.findings import Ranks
from samestep.judge.frozen_weights import copies_that_stay
from samestep.judge.places import Sources
from samestep.judge.source import Source
from samestep.judge.source_search import (
    calls,
    changes_of_weights,
    functions_that_average,
    impossible_conditions,
    mentions,
)
from samestep.message import Message, message
from samestep.records.call_site import CallSite
from samestep.records.findings import Finding, Question


def uncalled_code(ranks: Ranks, sources: Sources) -> list[Finding]:
    """Returns a warning of each condition that cannot hold, and of a moving average whose function is never called."""
    findings = [
        _warning(_question(source, line), message("condition_never_holds", condition=source.code(line).strip()), site)
        for file, source in sources.items()
        for line in impossible_conditions(source)
        for site in [CallSite(file, line, source.function(line))]
    ]
    if ranks[0].steps and (networks := copies_that_stay(ranks)):
        said = message("average_never_updated", network=networks[0], steps=len(ranks[0].steps))
        findings += [_warning("frozen weights", said, site) for site in _uncalled_averages([*sources.items()])]
    return findings


def _warning(question: Question, said: Message, site: CallSite) -> Finding:
    return Finding(question, "warning", said, sites=[site])


def _question(source: Source, line: int) -> Question:
    """Returns what a condition is about: moving averages, where it decides of a change of weights; else the steps."""
    changes = {number for number in changes_of_weights(source) if line in source.conditions(number)}
    called = {
        name
        for name in functions_that_average(source)
        for call in calls(source, name)
        if line in source.conditions(call)
    }
    return "frozen weights" if changes or called else "steps"


def _uncalled_averages(sources: Sequence[tuple[str, Source]]) -> list[CallSite]:
    """Returns the functions that average one model's parameters with another's, and that nothing mentions."""
    return [
        CallSite(file, line, name)
        for file, source in sources
        for name, line in functions_that_average(source).items()
        if not any(mentions(module_source, name) for _, module_source in sources)
    ]
