"""What the ranks do beside their steps: evaluation, random numbers, collectives, and files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from samestep.message import message
from samestep.proof.script.findings import Ranks, common_steps, differs
from samestep.proof.script.rows import WHOLE, indices
from samestep.records.script import NO_LOADER, EvaluationRecord, Finding, GroupRecord, PassRecord, Question

GATHERS = "gather"  # all_gather, gather, all_gather_into_tensor_coalesced, …
WORLD = "0"  # torch's name of the default group
ALIKE = ("all_reduce", "allreduce", "broadcast", "reduce")  # whose inputs have one shape on all ranks


# Evaluation


def evaluation(ranks: Ranks) -> Finding:
    """Whether the ranks together evaluate each row once, with the same model: of each evaluation, until one differs."""
    findings: list[Finding] = []
    for number in range(max(len(rank.evaluations) for rank in ranks)):
        records = {
            rank: record.evaluations[number] for rank, record in enumerate(ranks) if number < len(record.evaluations)
        }
        if any(record.number == NO_LOADER for record in records.values()):
            statistics = _statistics([*records.values()])
            findings += [statistics] if statistics else []
            continue
        passes = [ranks[rank].passes[record.number] for rank, record in records.items()]
        findings.append(_of_evaluation(passes, [*records.values()], len(ranks)))
        if findings[-1].answer == "differs":
            return findings[-1]
    nothing = Finding("evaluation", "unknown", message("no_evaluation_seen"))
    return next((finding for finding in findings if finding.answer == "warning"), findings[0] if findings else nothing)


def _of_evaluation(passes: Sequence[PassRecord], records: Sequence[EvaluationRecord], world_size: int) -> Finding:
    """Judges the evaluation of the ranks that take part in it."""
    question: Question = "evaluation"
    step = records[0].step
    if len({record.step for record in records}) > 1 or len({record.length for record in passes}) > 1:
        return _statistics(records) or Finding(question, "right", message("each_rank_evaluates_its_own_dataset"))
    lists = [read for record in passes if (read := indices(record)) is not None]
    length = passes[0].length
    if length is None or len(lists) < len(passes):
        return Finding(question, "unknown", message("loader_without_end_or_indices"))
    ranks_of_row = Counter(index for read in lists for index in {*read})
    missing, twice = length - len(ranks_of_row), sum(count - 1 for count in ranks_of_row.values())
    twice += sum(len(read) - len({*read}) for read in lists)
    evaluated = len(ranks_of_row)
    if all({*read} == {*ranks_of_row} for read in lists):
        if missing > (passes[0].batch_size or 1) and passes[0].sampler == WHOLE[0]:
            cause = message("rows_evaluated_by_no_rank", missing=missing, rows=length)
            return differs(question, "rows", cause, step=step, expected=length, found=evaluated)
        said = message("one_rank_evaluates", evaluated=evaluated, rows=length)
        if len(lists) == world_size > 1:
            said = message("each_rank_evaluates", evaluated=evaluated, rows=length)
        return _statistics(records) or Finding(question, "right", said)
    if twice and not missing and passes[0].sampler in WHOLE and _only_adds(records):
        cause = message("evaluated_rows_counted_twice", twice=twice, rows=length)
        return differs(question, "rows", cause, step=step, expected=length, found=length + twice)
    said = message("ranks_evaluate_together", evaluated=evaluated, rows=length, twice=twice or None)
    return _statistics(records) or Finding(question, "right", said)


def _only_adds(records: Sequence[EvaluationRecord]) -> bool:
    """Whether what the ranks found is added up, and no results of single rows are gathered."""
    called = [name for record in records for name in record.collectives]
    return any("reduce" in name for name in called) and not any(GATHERS in name for name in called)


def _statistics(records: Sequence[EvaluationRecord]) -> Finding | None:
    """Returns a warning where the ranks evaluate with other BatchNorm statistics at the same step."""
    first = records[0].buffers
    if len({record.step for record in records}) > 1 or any(record.buffers.keys() != first.keys() for record in records):
        return None
    different = [name for name in first if len({record.buffers[name] for record in records}) > 1]
    if not different:
        return None
    return Finding("buffers", "warning", message("statistics_differ_at_the_evaluation", buffer=different[0]))


# Random numbers


def randoms(ranks: Ranks) -> Finding:
    """Whether dropout's masks differ over ranks, by the state of torch's generators where they are drawn."""
    question: Question = "random numbers"
    if len(ranks) == 1:
        return Finding(question, "right", message("one_rank"))
    draws = [rank.randoms.draws for rank in ranks]
    steps = [step for step in common_steps(ranks) if all(len(states) > step and states[step] for states in draws)]
    seeds = [rank.randoms.workers for rank in ranks]
    one_seed = bool(seeds[0]) and all(workers == seeds[0] for workers in seeds)
    workers = message("loader_workers_share_a_seed") if one_seed else None
    if not steps:
        return Finding(question, "right", message("model_draws_no_random_numbers", workers=workers))
    if any(step.sharded for rank in ranks for step in rank.steps):
        return Finding(question, "unknown", message("sharded_layers_share_random_numbers"))
    for step in steps:
        states = [of_rank[step] for of_rank in draws]
        if same := [rank for rank, state in enumerate(states) if states.count(state) > 1]:
            cause = message("ranks_draw_the_same_random_numbers", ranks=same, step=step, workers=workers)
            return Finding(question, "warning", cause)
    return Finding(question, "right", message("ranks_draw_their_own_random_numbers", steps=len(steps), workers=workers))


# Collectives


def collectives(ranks: Ranks) -> Finding:
    """Whether the ranks of each process group have called the same collectives, as far as all have come."""
    question: Question = "collectives"
    names = list(dict.fromkeys(name for rank in ranks for name in rank.groups))
    if len(ranks) == 1:
        return Finding(question, "right", message("one_rank"))
    if not names:
        return Finding(question, "unknown", message("no_collectives_recorded"))
    count = 0
    for name in names:
        members = {rank: record.groups[name] for rank, record in enumerate(ranks) if name in record.groups}
        if not _are_one_group(name, members, ranks):
            continue
        if difference := _first_difference([*members.values()]):
            number, calls = difference
            apart = next(place for place, call in enumerate(calls) if _compared(call) != _compared(calls[0]))
            return differs(
                question,
                "collective",
                message("collectives_in_another_order"),
                rank=[*members][apart],
                expected=message("collective_as_on_rank", call=calls[0], number=number, group=name, rank=min(members)),
                found=calls[apart],
            )
        count += min(len(group.calls) for group in members.values())
    return Finding(question, "right", message("collectives_in_the_same_order", collectives=count))


def _are_one_group(name: str, members: Mapping[int, GroupRecord], ranks: Ranks) -> bool:
    """Whether these are the records of one group; of groups that were closed only the world's is known."""
    complete = all(group.ranks == [*members] for group in members.values())
    return complete or (name == WORLD and len(members) == len(ranks))


def _first_difference(groups: Sequence[GroupRecord]) -> tuple[int, list[str]] | None:
    """Returns the number of the first call that is not the same, and the ranks' calls."""
    first = max(group.first for group in groups)
    lists = [group.calls[first - group.first :] for group in groups]
    for number, calls in enumerate(zip(*lists), first):
        if len({_compared(call) for call in calls}) > 1:
            return number, [*calls]
    return None


def _compared(call: str) -> str:
    """Returns what must be the same: of most operations the name; a scatter's inputs are on one rank alone."""
    name = call.partition(" ")[0]
    return call if name in ALIKE else name


# Files


def saves(ranks: Ranks) -> Finding:
    """Whether each file that torch.save writes is written by one rank."""
    writers: dict[str, dict[int, int]] = defaultdict(dict)  # file -> rank -> the step
    for rank, record in enumerate(ranks):
        for save in record.saves:
            writers[save.file][rank] = save.step
    shared = {file: steps for file, steps in writers.items() if len(steps) > 1}
    if shared:
        file, steps = min(shared.items(), key=lambda file_and_steps: min(file_and_steps[1].values()))
        first = min(steps.values())
        cause = message("ranks_write_one_file", ranks=[*steps], file=PurePath(file).name, step=first)
        return Finding("saves", "warning", cause)
    said = message("files_of_one_rank_each", files=len(writers)) if writers else message("no_file_saved")
    return Finding("saves", "right", said)
