"""Judges whether the ranks together evaluate each row once, and reduce their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from samestep.judge.findings import Ranks, differs, first_apart
from samestep.judge.rows import WHOLE, indices, own_datasets, rows_in_common
from samestep.message import Message, message
from samestep.records.findings import Finding, Question
from samestep.records.script import NO_LOADER, EvaluationRecord, PassRecord

QUESTION: Question = "evaluation"
GATHERS, REDUCES = "gather", "reduce"  # all_gather, gather, all_gather_into_tensor_coalesced, …; all_reduce, …
OWN_COLLECTIVES = {"horovod"}  # libraries whose collectives torch's flight recorder does not see


def evaluation(ranks: Ranks) -> Finding:
    """Judges whether the ranks together evaluate each row once, with the same model: of each evaluation, until one
    differs."""
    findings: list[Finding] = []
    if apart := _evaluated_apart(ranks):
        findings.append(_warning(apart))
    for number in range(max(len(rank.evaluations) for rank in ranks)):
        records = {
            rank: record.evaluations[number] for rank, record in enumerate(ranks) if number < len(record.evaluations)
        }
        statistics = _statistics([*records.values()])
        if any(record.number == NO_LOADER for record in records.values()):
            own_rows = _own_rows_not_reduced([*records.values()], ranks)
            findings += [finding for finding in (statistics, own_rows) if finding]
            continue
        passes = [ranks[rank].passes[record.number] for rank, record in records.items()]
        finding = _of_evaluation(passes, [*records.values()], len(ranks))
        if finding.answer == "differs":
            return finding
        if finding.answer == "right":
            finding = statistics or finding
        if finding.answer == "right" and _is_never_brought_together(passes, [*records.values()], ranks):
            finding = _warning(message("evaluation_not_reduced"))
        findings.append(finding)
    nothing = Finding(QUESTION, "unknown", message("no_evaluation_seen"))
    return next((finding for finding in findings if finding.answer == "warning"), findings[0] if findings else nothing)


def _evaluated_apart(ranks: Ranks) -> Message | None:
    """Returns a finding where each rank evaluates a loader, but at different steps."""
    loaders: dict[tuple[str, int], dict[int, set[int]]] = {}  # the line that makes a loader -> rank -> steps
    for rank, record in enumerate(ranks):
        made = {call.number: call.sites[0] for call in record.calls if call.call == "loader" and call.sites}
        for evaluated in record.evaluations:
            number = record.passes[evaluated.number].loader if evaluated.number != NO_LOADER else NO_LOADER
            if site := made.get(number):
                loaders.setdefault((site.file, site.line), {}).setdefault(rank, set()).add(evaluated.step)
    for steps in loaders.values():
        if (step := first_apart(steps)) is not None:
            ranks_then = [rank for rank in steps if step in steps[rank]]
            return message("ranks_evaluate_at_different_steps", ranks=ranks_then, step=step)
    return None


def _warning(said: Message) -> Finding:
    return Finding(QUESTION, "warning", said)


def _right(said: Message) -> Finding:
    return Finding(QUESTION, "right", said)


def _of_evaluation(passes: Sequence[PassRecord], records: Sequence[EvaluationRecord], world_size: int) -> Finding:
    """Judges which rows are evaluated by the ranks that take part in an evaluation."""
    step, evaluates_all = records[0].step, _evaluate_the_same_rows(passes)
    if len({record.step for record in records}) > 1:
        return _right(message("each_rank_evaluates_its_own_dataset"))
    lists = [read for record in passes if (read := indices(record)) is not None]
    is_own = len({record.length for record in passes}) > 1 or own_datasets(passes)
    if is_own and (common := rows_in_common(passes, 0)) and not evaluates_all:
        cause, rows = message("evaluation_order_of_each_rank", shared=common), sum(map(len, lists))
        found = message("rows_on_several_ranks", shared=common, rows=rows)
        return differs(QUESTION, "rows", cause, step=step, expected=message("each_row_on_one_rank"), found=found)
    if is_own and (missing := _left_out(passes)):
        return _warning(message("evaluation_rows_left_out", missing=missing, rows=missing + sum(map(len, lists))))
    if is_own and not evaluates_all:
        return _right(message("each_rank_evaluates_its_own_dataset"))
    length = passes[0].length
    if length is None or len(lists) < len(passes):
        return Finding(QUESTION, "unknown", message("loader_without_end_or_indices"))
    ranks_of_row = Counter(index for read in lists for index in {*read})
    missing, twice = length - len(ranks_of_row), sum(count - 1 for count in ranks_of_row.values())
    twice += sum(len(read) - len({*read}) for read in lists)
    evaluated = len(ranks_of_row)
    if all({*read} == {*ranks_of_row} for read in lists):
        if missing > (passes[0].batch_size or 1) and passes[0].sampler == WHOLE[0]:
            cause = message("rows_evaluated_by_no_rank", missing=missing, rows=length)
            return differs(QUESTION, "rows", cause, step=step, expected=length, found=evaluated)
        if len(lists) < world_size or world_size == 1:
            return _right(message("one_rank_evaluates", evaluated=evaluated, rows=length))
        if evaluates_all and _only_adds(records):
            return _warning(message("evaluation_rows_counted_on_every_rank", rows=length, ranks=world_size))
        return _right(message("each_rank_evaluates", evaluated=evaluated, rows=length))
    if twice and not missing and passes[0].sampler in WHOLE and _only_adds(records):
        cause = message("evaluated_rows_counted_twice", twice=twice, rows=length)
        return differs(QUESTION, "rows", cause, step=step, expected=length, found=length + twice)
    if missing and passes[0].sampler in WHOLE and _read_to_the_end(passes):
        return _warning(message("evaluation_rows_left_out", missing=missing, rows=length))
    return _right(message("ranks_evaluate_together", evaluated=evaluated, rows=length, twice=twice or None))


def evaluates_loaders(ranks: Ranks) -> bool:
    """Returns whether some rank evaluates what a DataLoader reads."""
    return any(record.number != NO_LOADER for rank in ranks for record in rank.evaluations)


def _left_out(passes: Sequence[PassRecord]) -> int:
    """Returns how many rows of datasets of their own the ranks leave out, as drop_last does at the end of each."""
    if not _read_to_the_end(passes) or any(record.sampler not in WHOLE for record in passes):
        return 0
    return sum(max(0, (record.length or 0) - len({*(indices(record) or ())})) for record in passes)


def _read_to_the_end(passes: Sequence[PassRecord]) -> bool:
    return all(record.rest == [] for record in passes)


def _evaluate_the_same_rows(passes: Sequence[PassRecord]) -> bool:
    """Returns whether all ranks evaluate the same rows, by their content."""
    contents = _contents(passes)
    return bool(contents[0]) and all(rows == contents[0] for rows in contents)


def _contents(passes: Sequence[PassRecord]) -> list[set[tuple[str, ...]]]:
    """Returns the digests of the rows that each pass has read."""
    return [{tuple(row) for row in record.digests if row} for record in passes]


def _is_never_brought_together(passes: Sequence[PassRecord], records: Sequence[EvaluationRecord], ranks: Ranks) -> bool:
    """Returns whether each rank evaluates other rows, and no collective follows that would add up or gather their
    results."""
    libraries = {name for rank in ranks for name in rank.libraries}
    if len(passes) < len(ranks) or len(ranks) == 1 or OWN_COLLECTIVES & libraries:
        return False
    return _are_others(_contents(passes)) and _follows_no_reduction(records, ranks)


def _own_rows_not_reduced(records: Sequence[EvaluationRecord], ranks: Ranks) -> Finding | None:
    """Warns of losses of other rows on each rank, read without a DataLoader, that nothing brings together."""
    trained = {row for rank in ranks for step in rank.steps for batch in step.micro_batches for row in batch.rows}
    rows = [{*record.rows} if record.with_loss else set[str]() for record in records]
    all_evaluate = len(records) == len(ranks) > 1 and len({record.step for record in records}) == 1
    if not all_evaluate or not _are_others(rows) or not trained.isdisjoint(set().union(*rows)):
        return None
    return _warning(message("evaluation_not_reduced")) if _follows_no_reduction(records, ranks) else None


def _are_others(rows: Sequence[set[Any]]) -> bool:
    """Returns whether each rank evaluates other rows."""
    return all(rows) and len(set().union(*rows)) > 1.5 * max(map(len, rows))


def _follows_no_reduction(records: Sequence[EvaluationRecord], ranks: Ranks) -> bool:
    known = all(rank.groups for rank in ranks) and all(record.collectives for record in records)
    return known and not are_combined(records)


def are_combined(records: Sequence[EvaluationRecord]) -> bool:
    """Returns whether something is reduced or gathered after an evaluation. A barrier hands on nothing."""
    called = [name for record in records for name in record.collectives if "barrier" not in name]
    return any(REDUCES in name or GATHERS in name for name in called)


def _only_adds(records: Sequence[EvaluationRecord]) -> bool:
    """Returns whether the ranks' results are added up, and no results of single rows are gathered."""
    called = [name for record in records for name in record.collectives]
    return any(REDUCES in name for name in called) and not any(GATHERS in name for name in called)


def _statistics(records: Sequence[EvaluationRecord]) -> Finding | None:
    """Returns a warning where the ranks evaluate with other BatchNorm statistics at the same step."""
    first = records[0].buffers
    if len({record.step for record in records}) > 1 or any(record.buffers.keys() != first.keys() for record in records):
        return None
    different = [name for name in first if len({record.buffers[name] for record in records}) > 1]
    if not different:
        return None
    return Finding("buffers", "warning", message("statistics_differ_at_the_evaluation", buffer=different[0]))
