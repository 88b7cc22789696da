"""Whether the ranks together evaluate each row once, with the same model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from samestep.proof.script.rows import WHOLE, indices
from samestep.proof.script.updates import Ranks, differs, many
from samestep.records.beside_steps import NO_LOADER, EvaluationSeen
from samestep.records.script import Finding, PassSeen

QUESTION = "evaluation"
TWICE = (
    "{} of {} evaluated rows {} counted twice: the sampler pads the evaluation to equal shares, and what follows it "
    "adds up the ranks' sums, from which no row can be left out again"
)
MISSING = (
    "{} of {} rows are evaluated by no rank: fewer ranks evaluate than the rows are shared out to, or they are shared "
    "out twice"
)
STATISTICS = (
    "each rank evaluates with its own BatchNorm statistics ({}): a checkpoint, or rank 0, has those of one rank's rows "
    "alone. SyncBatchNorm, or a mean over ranks before the evaluation, makes them one model's"
)
GATHERS = "gather"  # all_gather, gather, all_gather_into_tensor_coalesced, …


def evaluation(ranks: Ranks) -> Finding:
    """Answers which rows the ranks evaluate: those of each evaluation, until one differs."""
    findings: list[Finding] = []
    for number in range(max(len(rank.evaluations) for rank in ranks)):
        of = [(rank, each) for rank, seen in enumerate(ranks) for each in seen.evaluations[number : number + 1]]
        if any(each.number == NO_LOADER for _, each in of):
            of_one = _statistics([each for _, each in of])
            findings += [of_one] if of_one else []
            continue
        findings.append(
            _of_one([ranks[rank].passes[each.number] for rank, each in of], [each for _, each in of], ranks)
        )
        if findings[-1].answer == "differs":
            return findings[-1]
    nothing = Finding(QUESTION, "unknown", "no evaluation of a DataLoader's batches was seen in the recorded steps")
    return next((each for each in findings if each.answer == "warning"), findings[0] if findings else nothing)


def _of_one(passes: Sequence[PassSeen], seen: Sequence[EvaluationSeen], ranks: Ranks) -> Finding:
    """Judges the evaluation of the ranks that take part in it."""
    step = seen[0].step
    if len({each.step for each in seen}) > 1 or len({each.length for each in passes}) > 1:
        return _statistics(seen) or Finding(QUESTION, "right", "each rank evaluates a dataset of its own")
    lists = [indices(each) for each in passes]
    known = [each for each in lists if each is not None]
    length = passes[0].length
    if length is None or len(known) < len(lists):
        return Finding(QUESTION, "unknown", "the evaluated loader has no end, or no indices")
    times = Counter(index for each in known for index in {*each})
    missing, twice = length - len(times), sum(count - 1 for count in times.values())
    twice += sum(len(each) - len({*each}) for each in known)
    if all({*each} == {*times} for each in known):
        who = "each rank" if len(known) == len(ranks) > 1 else "one rank"
        if missing > (passes[0].batch_size or 1) and passes[0].sampler == WHOLE[0]:
            return differs(
                QUESTION, "rows", MISSING.format(missing, length), step=step, expected=length, found=len(times)
            )
        return _statistics(seen) or Finding(QUESTION, "right", f"{who} evaluates {len(times)} of {many(length, 'row')}")
    if twice and not missing and passes[0].sampler in WHOLE and _only_adds(seen):
        cause = TWICE.format(twice, length, "is" if twice == 1 else "are")
        return differs(QUESTION, "rows", cause, step=step, expected=length, found=length + twice)
    said = f"the ranks together evaluate {len(times)} of {many(length, 'row')}"
    said += f", {twice} of them twice, as padding that can be left out of what is gathered" * bool(twice)
    return _statistics(seen) or Finding(QUESTION, "right", said)


def _only_adds(seen: Sequence[EvaluationSeen]) -> bool:
    """Whether what the ranks found is added up, and no results of single rows are gathered."""
    called = [name for each in seen for name in each.collectives]
    return any("reduce" in name for name in called) and not any(GATHERS in name for name in called)


def _statistics(seen: Sequence[EvaluationSeen]) -> Finding | None:
    if len({each.step for each in seen}) > 1 or any(each.buffers.keys() != seen[0].buffers.keys() for each in seen):
        return None
    wrong = [name for name in seen[0].buffers if len({each.buffers[name] for each in seen}) > 1]
    return Finding("buffers", "warning", STATISTICS.format(wrong[0])) if wrong else None
