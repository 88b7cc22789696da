"""Judges rates and schedules, by the records and the source: a schedule that is never stepped, stepped before the
optimizer, or longer than the training; and a rate that is set by hand as a multiple of the ranks."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from samestep.bounds import RATE_APART
from samestep.judge.findings import Ranks, differs
from samestep.judge.places import Sources
from samestep.judge.rate_factors import COUNTS, RateFactors
from samestep.judge.source import Source
from samestep.judge.source_search import calls
from samestep.message import message
from samestep.records.call_site import CallRecord, CallSite
from samestep.records.findings import Finding, Question
from samestep.records.script import ScheduleRecord, ScriptRecord

LONGER = 1.5  # times the training's length, from which on a schedule gets a warning
ASKED = ("state_dict", "load_state_dict", "get_last_lr", "get_lr", "last_epoch", "print_lr", "base_lrs")
SCHEDULE: Question = "schedule"
RATE: Question = "rate"
REPLAYED_RATE: Question = "replayed rate"


def with_schedules(findings: Sequence[Finding], ranks: Ranks, sources: Sources) -> list[Finding]:
    """Returns the findings, with those about rates and schedules for which the source is needed."""
    findings = [_with_factor(finding, ranks, sources) for finding in findings]
    if not ranks or not ranks[0].steps:
        return findings
    told = {finding.question: finding.answer for finding in findings}
    if told.get(RATE) == "right":
        findings += _counts_micro_batches(ranks[0], sources)
    checks: list[Callable[[ScriptRecord, Sources], Finding | None]] = [
        never_stepped,
        stepped_early,
        longer_than_training,
    ]
    alarmed = any(finding.question == SCHEDULE and finding.answer == "differs" for finding in findings)
    if not alarmed and not ranks[0].libraries:
        findings += [finding for check in checks if (finding := check(ranks[0], sources))]
    if REPLAYED_RATE not in told and told.get(RATE) == "right" and len(ranks) > 1:
        findings += _written_times_ranks(ranks, sources)
    return findings


# A rate that is set by hand


def _with_factor(finding: Finding, ranks: Ranks, sources: Sources) -> Finding:
    """Returns what is known of a rate that is another one on more ranks, and of which the replay alone cannot tell
    whether a schedule or the rate itself depends on their number: during a warm-up both have one factor."""
    fields, size = finding.message.fields, len(ranks)
    if finding.message.id != "schedule_depends_on_ranks" or not isinstance(fields.get("rate"), float):
        return finding
    step, rate, one_process = int(fields["step"]), float(fields["rate"]), float(fields["one_process"])
    factors = RateFactors(sources)
    if not one_process or not math.isclose(rate / one_process, size, rel_tol=RATE_APART):
        return finding
    if places := factors.times_ranks():
        cause = message("rate_depends_on_ranks", rate=rate, ranks=size, one_process=one_process, told=None)
        told = differs(REPLAYED_RATE, "learning rate", cause, step=step, rank=0, expected=one_process, found=rate)
        return _at(told, places, sources)
    if fields.get("ahead") and (places := factors.time_of_ranks()):
        said = message(
            "schedule_shorter_by_the_ranks", ranks=size, rate=rate, step=step, one_process=one_process, told=None
        )
        return _at(Finding(REPLAYED_RATE, "warning", said), places, sources)
    return finding


def _written_times_ranks(ranks: Ranks, sources: Sources) -> list[Finding]:
    """Finds a rate that is written times the ranks, of a training that is not replayed: nothing but the source tells
    it, so that a line which a setting may switch off is left alone."""
    made = [(site.file, site.line) for call in ranks[0].calls if call.call == "optimizer" for site in call.sites[:1]]
    places = [
        (file, line) for file, line in RateFactors(sources).times_ranks(made) if not _is_optional(sources[file], line)
    ]
    if not places:
        return []
    rate = max(ranks[0].steps[0].rates, default=0.0)
    return [
        _at(Finding(RATE, "warning", message("rate_written_times_ranks", ranks=len(ranks), rate=rate)), places, sources)
    ]


def _counts_micro_batches(rank: ScriptRecord, sources: Sources) -> list[Finding]:
    """Finds a schedule by hand that counts micro-batches, and has gone past its end: its rate has fallen, and rises."""
    rates = [max(step.rates, default=0.0) for step in rank.steps]
    turns = (before > rate < after for before, rate, after in zip(rates, rates[1:], rates[2:]))
    step = next((number for number, is_turn in enumerate(turns, 1) if is_turn), None)
    if step is None or rates[step + 1] - rates[step] >= 2 * (rates[step - 1] - rates[step]):  # a restart
        return []
    backwards = [call.sites[0] for call in rank.calls if call.call == "backward" and call.sites]
    counts = {source.micro_batches(site.line) for site in backwards if (source := sources.get(site.file))}
    places = [place for count in sorted(counts) for place in RateFactors(sources).time_of_micro_batches(count)]
    said = message("rate_counts_micro_batches", micro_batches=len(rank.steps[step].micro_batches), step=step)
    return [_at(Finding(RATE, "warning", said), places, sources)] if places else []


def _is_optional(source: Source, line: int) -> bool:
    """Returns whether a condition decides about a line that asks for no count of steps, as `if args.scale_rate:`."""
    tests = [node.test for node in source.around(line) if isinstance(node, ast.If | ast.IfExp)]
    names = [[node.id for node in ast.walk(test) if isinstance(node, ast.Name)] for test in tests]
    return any(not any(map(COUNTS.fullmatch, of_test)) for of_test in names)


def _at(finding: Finding, places: Sequence[tuple[str, int]], sources: Sources) -> Finding:
    sites = [CallSite(file, line, sources[file].function(line)) for file, line in places]
    return Finding(finding.question, finding.answer, finding.message, finding.divergence, sites)


# Schedules of torch


def never_stepped(rank: ScriptRecord, sources: Sources) -> Finding | None:
    """Finds a schedule that no line of the source can advance."""
    if any(any(step.schedules) for step in rank.steps) or any(call.call == "scheduler step" for call in rank.calls):
        return None
    for call in (call for call in rank.calls if call.call == "scheduler"):
        source = sources.get(call.sites[0].file)
        statement = source.statement(call.sites[0].line) if source else None
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        if isinstance(statement.targets[0], ast.Name) and not _uses(source, statement, statement.targets[0].id):
            said = message("schedule_never_stepped", schedule=call.name)
            return Finding(SCHEDULE, "warning", said, sites=call.sites[:1])
    return None


def _uses(source: Source | None, made: ast.stmt, name: str) -> bool:
    """Returns whether a schedule is used by a line of its file for more than to be asked or saved."""
    if source is None:
        return True
    asked = {
        node.value
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in ASKED
    }
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) and node not in asked
        for node in ast.walk(source.tree)
    )


def stepped_early(rank: ScriptRecord, sources: Sources) -> Finding | None:
    """Finds a schedule that is advanced once before the optimizer's first step, so that its first rate is skipped."""
    first, calls = rank.steps[0], [call for call in rank.calls if call.call == "scheduler step"]
    # A scaler skips steps, and the schedule goes on.
    if first.scale is not None or rank.alone or 1 not in first.schedules:
        return None
    plateaus = {call.number for call in rank.calls if call.call == "scheduler" and "Plateau" in call.name}
    early = [call for call in calls if call.first == 0 and call.number not in plateaus]
    if not early or any(call.count > call.last - call.first + 1 for call in early):
        return None
    said = message("schedule_stepped_before_optimizer")
    return Finding(SCHEDULE, "warning", said, sites=early[0].sites[:1])


def longer_than_training(rank: ScriptRecord, sources: Sources) -> Finding | None:
    """Finds a schedule that is not over when the loops around its step are."""
    for schedule in rank.schedules:
        advances = _advances(rank, schedule, sources) if schedule.length else None
        begun = max(rank.steps[0].schedules, default=0) - 1
        if advances and schedule.length and schedule.length > LONGER * (max(begun, 0) + advances):
            made = [call for call in rank.calls if call.call == "scheduler" and call.number == schedule.number]
            said = message("schedule_longer_than_training", length=schedule.length, advances=advances)
            return Finding(SCHEDULE, "warning", said, sites=made[0].sites[:1] if made else [])
    return None


def _advances(rank: ScriptRecord, schedule: ScheduleRecord, sources: Sources) -> int | None:
    """Returns how often a schedule is advanced in the whole training; None where that is not known."""
    calls = [call for call in rank.calls if call.call == "scheduler step" and call.number == schedule.number]
    steps = [call for call in rank.calls if call.call == "optimizer step"]
    backwards = [call for call in rank.calls if call.call == "backward"]
    if not rank.loops or not len(calls) == len(steps) == len(backwards) == 1 or _are_called_again(calls[0], sources):
        return None
    if _are_stepped_elsewhere(calls[0].sites[0], sources):
        return None
    around = _loops(calls[0], sources)
    loops = [loop for loop in rank.loops if (loop.file, loop.line) in around]
    if (
        not loops
        or len(loops) < len(around)
        or loops[-1] != rank.loops[-1]
        or any(loop.rounds is None for loop in rank.loops)
    ):
        return None
    rounds = math.prod(loop.rounds or 0 for loop in loops)
    if loops[0] != rank.loops[0]:  # once an epoch
        return rounds
    numbers = [max(step.schedules, default=0) for step in rank.steps]
    if any(after - before != 1 for before, after in pairwise(numbers)):
        return None
    first = rank.loops[0]
    inside = _innermost(backwards[0], sources) == (first.file, first.line)
    return math.ceil(rounds / max(len(step.micro_batches) for step in rank.steps)) if inside else rounds


def _loops(call: CallRecord, sources: Sources) -> set[tuple[str, int]]:
    """Returns the loops around a line, and around those that call the function it is in."""
    lines = [(site.file, source, site.line) for site in call.sites if (source := sources.get(site.file))]
    return {(file, loop) for file, source, line in lines for loop in source.loops(line)}


def _innermost(call: CallRecord, sources: Sources) -> tuple[str, int] | None:
    for site in call.sites:
        source = sources.get(site.file)
        if source and (loops := source.loops(site.line)):
            return site.file, loops[0]
    return None


def _are_stepped_elsewhere(site: CallSite, sources: Sources) -> bool:
    """Returns whether another line of the file advances the schedule that a line does."""
    source = sources.get(site.file)
    receiver = re.search(r"([\w.]+)\.step\(", source.code(site.line)) if source else None
    if source is None or receiver is None:
        return True
    return sum(receiver[0] in line for line in source.lines) > 1


def _are_called_again(call: CallRecord, sources: Sources) -> bool:
    """Returns whether a function of a line and its callers is called by several lines, so that the training goes on
    there."""
    names = {site.function for site in call.sites} - {"<module>"}
    return any(sum(len(calls(source, name)) for source in sources.values()) > 1 for name in names)
