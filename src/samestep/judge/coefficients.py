"""Judges whether a factor of the losses that looks like a number of ranks or micro-batches is a coefficient of the
loss: the script has it as a number, or one process has it, too."""

from __future__ import annotations

import math
from collections.abc import Sequence

from samestep.bounds import TOLD_APART
from samestep.judge.findings import Ranks
from samestep.judge.places import BACKWARD, FORWARD, Sources
from samestep.judge.sites import context_of
from samestep.message import message
from samestep.records.findings import Answer, Finding
from samestep.records.script import LossRecord, ScriptRecord

OF_RANKS = ("loss_multiplied_by_ranks", "loss_divided_by_ranks")
OF_MICRO_BATCHES = ("loss_not_divided_by_accumulation", "losses_divided_by_accumulation_twice")


def without_coefficients(findings: Sequence[Finding], ranks: Ranks, sources: Sources) -> list[Finding]:
    """Returns the findings; where the factor that differs stands in the loss as a number, it is not known whether it
    is meant."""
    return [
        _as_coefficient(finding)
        if finding.message.id in (*OF_RANKS, *OF_MICRO_BATCHES) and _is_written(finding, ranks, sources)
        else finding
        for finding in findings
    ]


def one_process_decides(findings: Sequence[Finding]) -> bool:
    """Returns whether all that differs is a factor that one process may have, too: then a replay tells."""
    return all(finding.message.id in OF_RANKS for finding in findings if finding.answer == "differs")


def with_one_process(finding: Finding, replayed: Answer | None) -> Finding:
    """Returns a finding about gradients; where one process has the same gradient, the factor of a loss is the loss's
    own, and what the script does to the mean is right."""
    if finding.message.id == "gradients_changed_alike" and replayed == "right":
        return Finding(finding.question, "right", message("gradients_changed_as_in_one_process"))
    if finding.message.id == "gradients_changed_alike" and replayed == "differs":
        return Finding(finding.question, "unknown", message("gradients_changed_otherwise"))
    if finding.answer != "differs" or finding.message.id not in OF_RANKS or replayed != "right":
        return finding
    return Finding(finding.question, "right", message("one_process_has_the_factor", warning=finding.message))


def multiplied_sum(ranks: Ranks, one_process: ScriptRecord) -> Finding | None:
    """Finds a sum that the ranks divide by its own number of values and multiply by their number, while one process
    does not multiply it. Where that number is a constant, one process has the same gradient, and each value weighs too
    much in both."""
    batches, replayed = ranks[0].steps[0].micro_batches, one_process.steps[0].micro_batches
    pairs = [pair for of_rank, of_one in zip(batches, replayed) for pair in zip(of_rank.losses, of_one.losses)]
    size = float(len(ranks))
    if not pairs or not all(_is_multiplied(term, size) and not _has(of_one, size) for term, of_one in pairs):
        return None
    return Finding("loss weight", "warning", message("loss_multiplied_by_ranks", ranks=len(ranks)))


def _is_multiplied(term: LossRecord, size: float) -> bool:
    together = abs(term.weight) * term.count
    return term.reduction == "sum" and _has(term, size) and math.isclose(together, size, rel_tol=TOLD_APART)


def _has(term: LossRecord, factor: float) -> bool:
    return any(math.isclose(abs(known), factor, rel_tol=TOLD_APART) for known in term.factors)


def _as_coefficient(finding: Finding) -> Finding:
    weight = finding.divergence.found if finding.divergence else None
    return Finding(finding.question, "unknown", message("loss_has_a_written_coefficient", weight=weight))


def _is_written(finding: Finding, ranks: Ranks, sources: Sources) -> bool:
    """Returns whether the factor of the losses, or its inverse, stands as a number in what makes the loss."""
    found = finding.divergence.found if finding.divergence else None
    if not isinstance(found, float) or found <= 0:
        return False
    context = context_of(finding, ranks, sources)
    return any(
        math.isclose(number, wanted, rel_tol=TOLD_APART)
        for site in [*BACKWARD(context), *FORWARD(context)]
        if site.file in sources
        for number in sources[site.file].coefficients(site.line)
        for wanted in (found, 1 / found)
    )
