"""Which rows the ranks train: shared out, each once, and in another order in the next epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from samestep.proof.script.updates import Ranks, common_steps, differs, many
from samestep.records.script import Finding, PassSeen, ScriptRecord

WHOLE = ("DistributedSampler", "RandomSampler", "SequentialSampler", "SeedableRandomSampler")  # these leave none out
SKIPS = "SkipBatchSampler"  # of Accelerate: reads the rest of an epoch, after a resume
ALL = (
    "each rank reads every row: nothing shares the rows out (DistributedSampler, or the library's preparation of the "
    "loader), so the ranks train the same epoch"
)


def rows(ranks: Ranks) -> Finding:
    """Whether the ranks train different rows, and together all of them."""
    if len(ranks) == 1:
        return Finding("rows", "right", "one rank")
    if same := _same_rows(ranks):
        return same
    passes = [trained(rank) for rank in ranks]
    if not all(passes) or any(indices(each[0]) is None for each in passes):
        return _by_content(ranks)
    for of in zip(*passes):
        finding = _of_pass(of)
        if finding.answer != "right":
            return finding
    return _of_pass([each[0] for each in passes])


def trained(rank: ScriptRecord) -> list[PassSeen]:
    """Returns the passes whose batches were trained, those of the loader that was trained first."""
    used = [each for each in rank.passes if each.trained]
    return [each for each in used if each.loader == used[0].loader]


def indices(of: PassSeen) -> list[int] | None:
    """Returns all indices of a pass, also those that it had not read yet; None where they are not known."""
    if of.rest is None or any(batch is None for batch in of.batches):
        return None
    return [*(index for batch in of.batches for index in batch or ()), *of.rest]


def _same_rows(ranks: Ranks) -> Finding | None:
    """Finds a step whose rows are the same on all ranks, to the last bit."""
    for step in common_steps(ranks):
        for number, micros in enumerate(zip(*(rank.steps[step].micro for rank in ranks))):
            of = [micro.rows for micro in micros]
            if of[0] and all(each == of[0] for each in of) and len({*of[0]}) == len(of[0]):
                loaders = [trained(rank) for rank in ranks]
                cause = (
                    ALL
                    if all(loaders) and _read_all(loaders)
                    else (
                        "the ranks train the same rows in the same step: the random numbers that choose them have "
                        "one seed, or the rows are not shared out"
                    )
                )
                where = f"micro-batch {number}: " if len(ranks[0].steps[step].micro) > 1 else ""
                shown = f"{where}the same {many(len(of[0]), 'row')} on {len(ranks)} ranks"
                return differs("rows", "rows", cause, step=step, rank=1, expected="other rows than rank 0", found=shown)
    return None


def _read_all(loaders: Sequence[Sequence[PassSeen]]) -> bool:
    lists = [indices(each[0]) for each in loaders]
    return all(read is not None and len({*read}) == each[0].length for read, each in zip(lists, loaders))


def _by_content(ranks: Ranks) -> Finding:
    """Compares the rows by their digests, where there are no indices."""
    seen = [[row for step in rank.steps for micro in step.micro for row in micro.rows] for rank in ranks]
    if not all(seen):
        return Finding("rows", "unknown", "the model's inputs are no tensors with a row each")
    twice = sum(len({*of}) for of in seen) - len(set().union(*seen))
    total = sum(map(len, seen))
    if twice > total / len(ranks) / 2:
        cause = "most rows are trained by several ranks: the rows are not shared out"
        return differs("rows", "rows", cause, step=0, expected="0 rows on several ranks", found=f"{twice} of {total}")
    return Finding(
        "rows",
        "right",
        f"{many(total, 'row')} in the recorded steps, {twice} of them on several ranks; whether an epoch has every row "
        "cannot be judged: no DataLoader with indices",
    )


def _of_pass(passes: Sequence[PassSeen]) -> Finding:
    lists = [indices(each) for each in passes]
    if any(each is None for each in lists):
        return Finding("rows", "unknown", "the loader has no end, or no indices")
    full = [each for each in lists if each is not None]
    if _own_datasets(passes):
        own = Finding("rows", "right", "each rank has a dataset of its own, and no common row was seen")
        return _common_rows(passes, 0) or own
    length, union = passes[0].length or 0, {index for each in full for index in each}
    twice = sum(map(len, full)) - len(union)
    inside = sum(len(each) - len({*each}) for each in full)
    batch = max((len(each) for of in passes for each in of.batches if each), default=1)
    allowed = len(passes) * batch
    step = 0
    if inside > allowed:
        return Finding("rows", "unknown", f"{inside} rows are drawn repeatedly within a rank, as with replacement")
    if all({*each} == union for each in full) and len(union) > 1:  # the one row of a sampler that pads
        return differs("rows", "rows", ALL, step=step, expected=f"{length // len(full)} on each rank", found=length)
    if twice > allowed:
        cause = (
            "many rows are read by several ranks: the ranks' samplers do not share one order (another seed or epoch)"
        )
        return differs("rows", "rows", cause, step=step, expected="each on one rank", found=f"{twice} on several")
    missing = length - len(union)
    if missing > allowed:
        if passes[0].sampler not in WHOLE:
            return Finding("rows", "unknown", f"{missing} of {length} rows are left out, as the sampler may intend")
        cause = (
            f"{missing} of {length} rows are read by no rank: the rows are shared out twice, or among more ranks than "
            "there are"
        )
        return differs("rows", "rows", cause, step=step, expected=length, found=len(union))
    if shared := _common_rows(passes, twice):
        return shared
    extra = [f"{twice} of them twice, as padding"] * bool(twice) + [f"{missing} dropped at the end"] * bool(missing)
    return Finding("rows", "right", ", ".join([f"an epoch reads {len(union)} of {many(length, 'row')}", *extra]))


def _common_rows(passes: Sequence[PassSeen], padding: int) -> Finding | None:
    """Finds rows that several ranks have read, by their content, though not by their indices."""
    read = [[tuple(row) for row in each.digests if row] for each in passes]
    common = sum(len({*rows}) for rows in read) - len({row for rows in read for row in rows})
    distinct = all(len({*rows}) == len(rows) for rows in read)  # else a row's content says little
    if distinct and common > padding + max(2, sum(map(len, read)) / 20):
        cause = (
            "each rank has another dataset with rows of the others: it splits, shuffles or filters the data by its own "
            "random numbers (random_split without a common generator)"
        )
        return differs("rows", "rows", cause, step=0, expected="each on one rank", found=f"{common} on several")
    return None


def _own_datasets(passes: Sequence[PassSeen]) -> bool:
    """Whether the same indices are other rows on each rank: none of their tensors is always that of the other ranks.

    A label may be the same by chance; one that always is belongs to the same rows, whose pictures may be augmented.
    """
    if len({each.length for each in passes}) > 1 or len({each.dataset for each in passes}) > 1:
        return True
    known = [_digests(each) for each in passes]
    common = set(known[0]).intersection(*known[1:])
    pairs = [(known[0][index], other[index]) for index in common for other in known[1:]]
    tensors = zip(*([a == b for a, b in zip(one, other)] for one, other in pairs))
    return bool(pairs) and not any(map(all, tensors))


def _digests(of: PassSeen) -> Mapping[int, list[str]]:
    read = [index for batch in of.batches for index in batch or ()]
    return {index: digests for index, digests in zip(read, of.digests) if digests}


def order(ranks: Ranks) -> Finding:
    """Whether an epoch has another order than the one before."""
    question, passes = "order", trained(ranks[0])
    if repeated := _repeated_after_resume(ranks[0]):
        return repeated
    lists = [each for each in map(indices, passes) if each is not None]
    if len(lists) < 2:
        hint = ""
        if passes and lists:
            per_step = max(1, sum(map(len, _read(passes[0]))) // max(1, len(ranks[0].steps)))
            hint = f"; samestep check --steps {len(lists[0]) // per_step + 1} SCRIPT would see one"
            if passes[0].sampler == "DistributedSampler" and not ranks[0].epochs_set:
                hint += "; set_epoch has not been called, without which each epoch has the same order"
        return Finding(question, "unknown", f"no epoch turned in the recorded steps{hint}")
    if lists[0] == sorted(lists[0]):
        return Finding(question, "right", "the rows are read in their order, without shuffling")
    for number, (before, after) in enumerate(pairwise(lists), 1):
        if before == after and len(before) > 2:
            step = _first_step(ranks[0], passes[number])
            never = " is never called" if not ranks[0].epochs_set else " is given the same number"
            cause = f"each epoch has the same shuffled order: the sampler's set_epoch{never}"
            shown = {"expected": "another order than in the epoch before", "found": before[:6]}
            return differs(question, "rows", cause, step=step, rank=0, **shown)
    return Finding(question, "right", f"each of {many(len(lists), 'epoch')} has an order of its own")


def _repeated_after_resume(rank: ScriptRecord) -> Finding | None:
    """Finds an epoch whose order is that of the epoch before it, of which a resumed training read the rest."""
    used = [each for each in rank.passes if each.trained]
    for before, after in pairwise(used):
        rest, whole = indices(before), indices(after)
        if before.sampler != SKIPS or not rest or not whole or len(rest) < 3 or rest == sorted(rest):
            continue
        if len(rest) < len(whole) and whole[-len(rest) :] == rest:
            cause = "the epoch after the resumed one has its order again: the loader does not know that one has ended"
            shown = {"expected": "another order than in the epoch before", "found": rest[:6]}
            return differs("order", "rows", cause, step=_first_step(rank, after), rank=0, **shown)
    return None


def _read(of: PassSeen) -> list[list[int]]:
    return [batch for batch in of.batches if batch]


def _first_step(rank: ScriptRecord, of: PassSeen) -> int | None:
    number = next(i for i, each in enumerate(rank.passes) if each is of)
    steps = (i for i, step in enumerate(rank.steps) for micro in step.micro if number in micro.passes)
    return next(steps, None)
