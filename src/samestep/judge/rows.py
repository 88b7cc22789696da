"""Judges which rows the ranks train: whether each row is on one rank, once, and in another order in the next epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from samestep.bounds import ROWS_ALIKE_BY_CHANCE
from samestep.judge.findings import Ranks, common_steps, differs
from samestep.message import message
from samestep.records.findings import Finding, Question
from samestep.records.script import PassRecord, ScriptRecord

# These samplers leave no row out.
WHOLE = ("DistributedSampler", "RandomSampler", "SequentialSampler", "SeedableRandomSampler")
FEW_BATCHES = 3  # batches of the same rows that several ranks may train by chance
SKIPS = "SkipBatchSampler"  # Accelerate's sampler that gives the rest of an epoch, after a resume


def rows(ranks: Ranks) -> Finding:
    """Judges whether the ranks train different rows, and together all of them."""
    if len(ranks) == 1:
        return Finding("rows", "right", message("one_rank"))
    if share_inputs(ranks):
        return Finding("rows", "unknown", message("ranks_share_inputs"))
    if same := _same_rows(ranks):
        return same
    if repeated := _repeated_by_workers(ranks):
        return repeated
    passes = [trained(rank) for rank in ranks]
    if not all(passes) or any(indices(of_rank[0]) is None for of_rank in passes):
        return _by_content(ranks)
    if apart := _numbered_apart(passes):
        return apart
    for epoch in zip(*passes):
        finding = _of_epoch(epoch)
        if finding.answer != "right":
            return finding
    return _of_epoch([of_rank[0] for of_rank in passes])


def trained(rank: ScriptRecord) -> list[PassRecord]:
    """Returns the passes whose batches were trained, those of the loader that was trained first."""
    used = [record for record in rank.passes if record.trained]
    return [record for record in used if record.loader == used[0].loader]


def indices(record: PassRecord) -> list[int] | None:
    """Returns all indices of a pass, also those that it had not read yet; None where they are not known."""
    if record.rest is None or any(batch is None for batch in record.batches):
        return None
    return [*(index for batch in record.batches for index in batch or ()), *record.rest]


def share_inputs(ranks: Ranks) -> bool:
    """Returns whether the ranks give a model the same rows, as the features of a whole graph, and train it on others of
    its outputs: by other inputs beside the rows, or by other targets of what no loader has read."""
    if len(ranks) == 1 or not common_steps(ranks):
        return False
    of_ranks = [rank.steps[0].micro_batches[:1] for rank in ranks]
    firsts = [micro_batch for micro_batches in of_ranks for micro_batch in micro_batches]
    if len(firsts) < len(ranks) or not firsts[0].rows or any(batch.rows != firsts[0].rows for batch in firsts):
        return False
    chosen = [batch.other_inputs for batch in firsts]
    targets = [batch.targets for batch in firsts] if not any(map(trained, ranks)) else []
    return any(value != values[0] for values in (chosen, targets) for value in values[1:])


def _same_rows(ranks: Ranks) -> Finding | None:
    """Finds a step whose rows are the same on all ranks, to the last bit."""
    for step in common_steps(ranks):
        for number, micro_batches in enumerate(zip(*(rank.steps[step].micro_batches for rank in ranks))):
            first = micro_batches[0].rows
            if not first or len({*first}) < len(first) or any(batch.rows != first for batch in micro_batches):
                continue
            passes = [trained(rank) for rank in ranks]
            cause = message("ranks_train_the_same_rows")
            if all(passes) and _read_all(passes):
                cause = message("rows_not_shared_out")
            micro_batch = number if len(ranks[0].steps[step].micro_batches) > 1 else None
            return differs(
                "rows",
                "rows",
                cause,
                step=step,
                rank=1,
                expected=message("other_rows_than_rank_0"),
                found=message("same_rows_on_ranks", micro_batch=micro_batch, rows=len(first), ranks=len(ranks)),
            )
    return _same_batches(ranks)


def _same_batches(ranks: Ranks) -> Finding | None:
    """Finds a rank most of whose batches rank 0 trains as well, row for row, in the same step or the one beside it.

    A row may come several times in a batch, as a token's does, or where several modules receive it.
    """
    first, *other_ranks = [_batches(rank) for rank in ranks]
    for rank, batches in enumerate(other_ranks, 1):
        near = {(step + late, batch) for step, batch in first for late in (-1, 0, 1)}
        repeated = [(step, batch) for step, batch in batches if (step, batch) in near]
        if len({batch for _, batch in repeated}) < FEW_BATCHES or 2 * len(repeated) < len(batches):
            continue
        cause = message("ranks_train_the_same_batches", rank=rank)
        found = message("batches_of_rank_0", batches=len(repeated), of_batches=len(batches))
        expected = message("other_rows_than_rank_0")
        return differs("rows", "rows", cause, step=repeated[0][0], rank=rank, expected=expected, found=found)
    return None


def _batches(rank: ScriptRecord) -> list[tuple[int, tuple[str, ...]]]:
    """Returns the steps and rows of the micro-batches of several rows that are not all the same."""
    rows_of_steps = [
        (number, tuple(part.rows)) for number, step in enumerate(rank.steps) for part in step.micro_batches
    ]
    return [(number, batch) for number, batch in rows_of_steps if len({*batch}) > 1]


def _repeated_by_workers(ranks: Ranks) -> Finding | None:
    """Finds a pass over an IterableDataset whose workers each read the same rows: batches come once of each worker."""
    for rank, record in enumerate(ranks):
        for number, read in enumerate(record.passes):
            if read.workers < 2 or not read.trained or any(batch is not None for batch in read.batches):
                continue
            batches = [
                (step, micro_batch.rows)
                for step, step_record in enumerate(record.steps)
                for micro_batch in step_record.micro_batches
                if micro_batch.passes == [number]
            ]
            rounds = [batches[first : first + read.workers] for first in range(0, len(batches), read.workers)]
            complete = [turn for turn in rounds if len(turn) == read.workers]
            # A batch of one row that occurs several times says little.
            if complete and all(len({*rows}) > 1 and rows == turn[0][1] for turn in complete for _, rows in turn):
                cause = message("workers_each_read_every_row", workers=read.workers)
                expected, found = (
                    message("each_row_in_one_worker"),
                    message("same_rows_in_workers", rows=len(batches[0][1])),
                )
                step = batches[0][0]
                return differs("rows", "rows", cause, step=step, rank=rank, expected=expected, found=found)
    return None


def _read_all(passes: Sequence[Sequence[PassRecord]]) -> bool:
    """Returns whether each rank's first pass reads its whole dataset."""
    firsts = [of_rank[0] for of_rank in passes]
    return all((read := indices(first)) is not None and len({*read}) == first.length for first in firsts)


def _by_content(ranks: Ranks) -> Finding:
    """Compares the rows by their digests, where there are no indices."""
    digests = [
        [row for step in rank.steps for micro_batch in step.micro_batches for row in micro_batch.rows] for rank in ranks
    ]
    if not all(digests):
        return Finding("rows", "unknown", message("inputs_without_rows"))
    total = sum(map(len, digests))
    twice = sum(_on_several_ranks(epoch) for epoch in _epochs_of_content(ranks))
    if twice > total / len(ranks) / 2:
        return differs(
            "rows",
            "rows",
            message("most_rows_on_several_ranks"),
            step=0,
            expected=message("rows_on_several_ranks", shared=0, rows=total),
            found=message("rows_on_several_ranks", shared=twice, rows=total),
        )
    return Finding("rows", "right", message("rows_without_indices", rows=total, shared=twice))


def _epochs_of_content(ranks: Ranks) -> list[list[list[str]]]:
    """Returns epoch -> rank -> the rows that it trains. An epoch begins where rows come again, after all rows there are
    have come; otherwise all steps are one."""
    steps = [
        [[row for micro_batch in step.micro_batches for row in micro_batch.rows] for step in steps_of_ranks]
        for steps_of_ranks in zip(*(rank.steps for rank in ranks))
    ]
    every = {row for of_ranks in steps for rows in of_ranks for row in rows}
    epochs, met = [steps[:1]], {row for of_ranks in steps[:1] for rows in of_ranks for row in rows}
    for of_ranks in steps[1:]:
        rows = {row for of_rank in of_ranks for row in of_rank}
        if met == every and rows & met:
            epochs.append([])
            met = set()
        met |= rows
        epochs[-1].append(of_ranks)
    return [[[row for rows in of_rank for row in rows] for of_rank in zip(*epoch)] for epoch in epochs]


def _on_several_ranks(digests: Sequence[Sequence[str]]) -> int:
    """Returns how many rows that ranks train are another rank's as well."""
    return sum(len({*of_rank}) for of_rank in digests) - len(set().union(*digests))


def _of_epoch(passes: Sequence[PassRecord]) -> Finding:
    """Compares what the ranks read in one epoch by the indices of the rows. passes: one of each rank."""
    lists = [read for record in passes if (read := indices(record)) is not None]
    if len(lists) < len(passes):
        return Finding("rows", "unknown", message("loader_without_end_or_indices"))
    if own_datasets(passes):
        return _common_rows(passes, 0) or Finding("rows", "right", message("each_rank_has_its_own_dataset"))
    length, union = passes[0].length or 0, {index for read in lists for index in read}
    twice = sum(map(len, lists)) - len(union)
    inside = sum(len(read) - len({*read}) for read in lists)
    batch_size = max((len(batch) for record in passes for batch in record.batches if batch), default=1)
    allowed = len(passes) * batch_size
    if repeated := _repeated_by_sampler(passes, lists):
        return repeated
    # The last batch may be filled up with rows of the beginning.
    early = [read[: -batch_size or None] for read in lists]
    if inside > allowed or any(len(read) > len({*read}) for read in early):
        return Finding("rows", "unknown", message("rows_drawn_with_replacement", rows=inside))
    # One row alone is what a sampler that pads gives to each rank.
    if all({*read} == union for read in lists) and len(union) > 1:
        cause, share = message("rows_not_shared_out"), message("rows_of_each_rank", rows=length // len(lists))
        return differs("rows", "rows", cause, step=0, expected=share, found=length)
    # A DistributedSampler pads to equal shares; the loaders that libraries make pad to whole batches.
    padding = len(passes) if passes[0].sampler == WHOLE[0] and length > len(passes) else allowed
    if twice > padding:
        return differs(
            "rows",
            "rows",
            message("samplers_do_not_share_one_order"),
            step=0,
            expected=message("each_row_on_one_rank"),
            found=message("rows_on_several_ranks", shared=twice, rows=length),
        )
    missing = length - len(union)
    if missing > allowed and passes[0].sampler not in WHOLE:
        return Finding("rows", "unknown", message("rows_left_out_by_the_sampler", missing=missing, rows=length))
    if missing > allowed:
        cause = message("rows_read_by_no_rank", missing=missing, rows=length)
        return differs("rows", "rows", cause, step=0, expected=length, found=len(union))
    said = message("epoch_reads_rows", read=len(union), rows=length, twice=twice or None, dropped=missing or None)
    return _common_rows(passes, twice) or Finding("rows", "right", said)


def _repeated_by_sampler(passes: Sequence[PassRecord], lists: Sequence[Sequence[int]]) -> Finding | None:
    """Finds a sampler of the script's own that gives each row as often as any other over the ranks, each of which reads
    other ones: as one for several views of a row."""
    if passes[0].sampler in WHOLE or len({tuple(read) for read in lists}) < len(lists):
        return None
    reads = Counter(index for read in lists for index in read)
    (times, rows), *_ = Counter(reads.values()).most_common(1)
    # The end of the order may be cut off.
    if times < 2 or len(reads) - rows > len(lists):
        return None
    figures = {"read": len(reads), "rows": passes[0].length or 0, "times": times, "sampler": passes[0].sampler}
    return Finding("rows", "right", message("rows_repeated_by_sampler", **figures))


def rows_in_common(passes: Sequence[PassRecord], padding: int) -> int:
    """Returns how many rows several ranks have read, by their content; 0 where that may be chance or padding."""
    read = [[tuple(row) for row in record.digests if row] for record in passes]
    common = sum(len({*rows}) for rows in read) - len({row for rows in read for row in rows})
    distinct = all(len({*rows}) == len(rows) for rows in read)  # otherwise the contents of a row tell little
    return common if distinct and common > padding + max(2, ROWS_ALIKE_BY_CHANCE * sum(map(len, read))) else 0


def _common_rows(passes: Sequence[PassRecord], padding: int) -> Finding | None:
    """Finds rows that several ranks have read, by their content, though not by their indices."""
    common = rows_in_common(passes, padding)
    if not common:
        return None
    return differs(
        "rows",
        "rows",
        message("datasets_of_the_ranks_overlap"),
        step=0,
        expected=message("each_row_on_one_rank"),
        found=message("rows_on_several_ranks", shared=common, rows=sum(len(record.digests) for record in passes)),
    )


def _numbered_apart(passes: Sequence[Sequence[PassRecord]]) -> Finding | None:
    """Finds a tensor of few values, as a label, whose values are numbered differently on two ranks: wherever one rank
    has one value, the other rank has another value, in rows that both ranks have read in different epochs, and that
    another tensor shows to be the same."""
    first, *other_ranks = [
        {i: row for read in of_rank for i, row in _digests_by_index(read).items()} for of_rank in passes
    ]
    for rank, rows_of_rank in enumerate(other_ranks, 1):
        common = sorted(first.keys() & rows_of_rank.keys())
        columns = [*zip(*(zip(first[index], rows_of_rank[index]) for index in common))]
        is_same_row = any(len({*column}) > len(common) / 2 and all(a == b for a, b in column) for column in columns)
        for number, column in enumerate(columns if is_same_row else ()):
            values = {*column}
            is_one_to_one = len(values) == len({a for a, _ in column}) == len({b for _, b in column})
            apart = next((place for place, (a, b) in enumerate(column) if a != b), None)
            # A tensor of one value may be the number of the rank; a tensor of many values may be noise.
            if apart is not None and is_one_to_one and 1 < len(values) <= len(common) / 2:
                cause = message("classes_numbered_by_each_rank", classes=len(values))
                place, same = f"dataset[{common[apart]}][{number}]", message("same_digest_on_all_ranks")
                found = [value[:8] for value in column[apart]]
                return differs("rows", "rows", cause, step=0, tensor=place, rank=rank, expected=same, found=found)
    return None


def own_datasets(passes: Sequence[PassRecord]) -> bool:
    """Returns whether each rank has a dataset of its own: at the same index, every tensor of a row differs.

    A label may be the same by chance; one that always is belongs to the same rows, whose pictures may be augmented.
    So does a share of pictures that are the same: an augmentation by chance leaves some as they are.
    """
    if len({record.length for record in passes}) > 1 or len({record.dataset for record in passes}) > 1:
        return True
    first, *of_ranks = [_digests_by_index(record) for record in passes]
    common = set(first).intersection(*of_ranks)
    pairs = [(first[index], digests[index]) for index in common for digests in of_ranks]
    tensors = zip(*([a == b for a, b in zip(row, same_index)] for row, same_index in pairs))
    return bool(pairs) and not any(map(all, tensors)) and not _often_the_same(pairs)


def _often_the_same(pairs: Sequence[tuple[list[str], list[str]]]) -> bool:
    """Returns whether rows that differ from one another are the same on two ranks more often than by chance."""
    alike = sum(row == same_index for row, same_index in pairs)
    distinct = len({tuple(row) for row, _ in pairs}) * 2 > len(pairs)
    return distinct and alike > max(2, len(pairs) / 4)


def _digests_by_index(record: PassRecord) -> Mapping[int, list[str]]:
    read = [index for batch in record.batches for index in batch or ()]
    return {index: digests for index, digests in zip(read, record.digests) if digests}


def order(ranks: Ranks) -> Finding:
    """Judges whether an epoch has another order than the one before."""
    question: Question = "order"
    passes = trained(ranks[0])
    if repeated := _repeated_after_resume(ranks[0]):
        return repeated
    lists = [read for read in map(indices, passes) if read is not None]
    if len(lists) < 2:
        steps = no_set_epoch = None
        if passes and lists:
            steps = None if ranks[0].ended == "itself" else _steps_to_next_epoch(ranks[0], passes[0], lists[0])
            if passes[0].sampler == "DistributedSampler" and not ranks[0].epochs_set:
                no_set_epoch = message("set_epoch_not_called_yet")
        return Finding(question, "unknown", message("no_epoch_turned", steps=steps, set_epoch=no_set_epoch))
    if lists[0] == sorted(lists[0]):
        numbers = {call.number for call in ranks[0].calls if call.call == "set_epoch"}
        if passes[0].sampler == "DistributedSampler" and passes[0].loader in numbers:
            return Finding(question, "warning", message("set_epoch_without_shuffle"))
        return Finding(question, "right", message("rows_read_in_order"))
    for number, (before, after) in enumerate(pairwise(lists), 1):
        if before == after and len(before) > 2:
            # torch's own shuffling has no set_epoch: one process repeats that order, too.
            if passes[number].sampler == "RandomSampler" and not ranks[0].epochs_set:
                return Finding(question, "warning", message("generator_of_shuffling_is_seeded_anew"))
            return differs(
                question,
                "rows",
                message("set_epoch_given_the_same_number")
                if ranks[0].epochs_set
                else message("set_epoch_never_called"),
                step=_first_step(ranks[0], passes[number]),
                rank=0,
                expected=message("another_order_than_before"),
                found=before[:6],
            )
    return Finding(question, "right", message("each_epoch_has_its_own_order", epochs=len(lists)))


def _steps_to_next_epoch(rank: ScriptRecord, record: PassRecord, rows_of_pass: Sequence[int]) -> int:
    """Returns how many steps it takes until a batch of the next epoch is read."""
    rows_read = sum(len(batch) for batch in record.batches if batch)
    return -(-len(rows_of_pass) * len(rank.steps) // max(1, rows_read)) + 1


def _repeated_after_resume(rank: ScriptRecord) -> Finding | None:
    """Finds an epoch in the same order as the one before it, which a resumed training had begun in its middle."""
    for before, after in pairwise(record for record in rank.passes if record.trained):
        remainder, epoch = indices(before), indices(after)
        if (
            before.sampler != SKIPS
            or not remainder
            or not epoch
            or len(remainder) < 3
            or remainder == sorted(remainder)
        ):
            continue
        if len(remainder) < len(epoch) and epoch[-len(remainder) :] == remainder:
            return differs(
                "order",
                "rows",
                message("order_repeats_after_resume"),
                step=_first_step(rank, after),
                rank=0,
                expected=message("another_order_than_before"),
                found=remainder[:6],
            )
    return None


def _first_step(rank: ScriptRecord, record: PassRecord) -> int | None:
    """Returns the first step that trains batches of a pass."""
    number = next(number for number, known in enumerate(rank.passes) if known is record)
    return next(
        (
            step_number
            for step_number, step in enumerate(rank.steps)
            for micro_batch in step.micro_batches
            if number in micro_batch.passes
        ),
        None,
    )


# Along the stages of a pipeline


def batch_apart(first: ScriptRecord, last: ScriptRecord) -> tuple[int, list[int] | None, list[int] | None] | None:
    """Returns the first batch of which two ranks read other rows: its number, and the rows of both; None where there is
    none. Rows with other indices are the same where their contents are."""
    for first_pass, last_pass in zip(first.passes, last.passes):
        contents = [*zip(first_pass.digests, last_pass.digests)]
        if contents and all(first_digest == last_digest for first_digest, last_digest in contents):
            continue
        for number, (rows, other_rows) in enumerate(zip(first_pass.batches, last_pass.batches)):
            if rows != other_rows:
                return number, rows, other_rows
    return None


def rows_along_stages(stages: Sequence[Ranks]) -> Finding | None:
    """Finds that the first and the last stage read other rows. Whether the last one takes its targets from them is not
    known."""
    for first, last in zip(stages[0], stages[-1]):
        if batch_apart(first, last):
            return Finding("rows", "unknown", message("stages_may_read_other_rows", ranks=[first.rank, last.rank]))
    return None


# Within a replica


def other_rows_within(
    replica: Sequence[int], rank: int, *, axis: str, data_axis: str, replicas: int, step: int
) -> Finding:
    """Returns the finding about a rank that reads other rows than the first rank of its replica, along an axis of which
    each rank computes a piece of the same batch."""
    ranks = [replica[0], rank]
    cause = message("replica_reads_other_rows", axis=axis, data=data_axis, ranks=ranks, replicas=replicas)
    expected, found = message("rows_of_rank", rank=replica[0]), message("other_rows")
    return differs("rows", f"rows along {axis}", cause, step=step, rank=rank, expected=expected, found=found)
