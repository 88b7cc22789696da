"""Which rows the ranks train, on records that are made up. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from judge.test_script import ROWS, judged, ranks_of, recorded
from samestep.judge.rows import _epochs_of_content, order, rows
from samestep.message import Message, message
from samestep.records.call_site import Call, CallRecord
from samestep.records.script import MicroBatchRecord, PassRecord, ScriptRecord


def with_pass(rank: ScriptRecord, own: Sequence[int], digest: str = "x", length: int = ROWS) -> ScriptRecord:
    digests = [[f"{digest} {index}"] for index in own[:6]]
    seen = PassRecord(0, length, 3, [[index] for index in own[:6]], list(own[6:]), digests, 4, "DistributedSampler")
    return replace(rank, passes=[seen])


def epoch_of(read: int, twice: int | None = None, dropped: int | None = None) -> Message:
    return message("epoch_reads_rows", read=read, rows=24, twice=twice, dropped=dropped)


@pytest.mark.parametrize(
    ("first", "second", "digests", "answer", "said"),
    [
        (range(0, 24, 2), range(1, 24, 2), "xx", "right", epoch_of(24)),
        (range(12), range(12, 23), "xx", "right", epoch_of(23, dropped=1)),
        (range(13), range(12, 24), "xx", "right", epoch_of(24, twice=1)),
        (range(13), range(10, 24), "xx", "differs", message("samplers_do_not_share_one_order")),
        (range(12), range(6, 18), "xx", "differs", message("samplers_do_not_share_one_order")),
        (range(8), range(8, 16), "xx", "differs", message("rows_read_by_no_rank", missing=8, rows=24)),
        (range(24), range(24), "xx", "differs", message("rows_not_shared_out")),
        (range(24), range(24), "xy", "right", message("each_rank_has_its_own_dataset")),
        ([0] * 12, range(12, 24), "xx", "unknown", message("rows_drawn_with_replacement", rows=11)),
    ],
    ids=[
        "shared",
        "dropped",
        "padded",
        "overlap of three",
        "overlap",
        "left out",
        "all",
        "own datasets",
        "replacement",
    ],
)
def test_rows_that_are_shared_out(
    first: Sequence[int], second: Sequence[int], digests: str, answer: str, said: Message, tmp_path: Path
) -> None:
    ranks = ranks_of(tmp_path)
    finding = rows([with_pass(ranks[0], [*first], digests[0]), with_pass(ranks[1], [*second], digests[1])])
    assert (finding.answer, finding.message) == (answer, said)


@pytest.mark.parametrize(
    ("lists", "sampler", "said"),
    [
        # Each row three times in one order, of which each rank takes every other place.
        ([sorted([*range(24)] * 3)[rank::2] for rank in (0, 1)], "RASampler", "rows_repeated_by_sampler"),
        ([sorted([*range(24)] * 3)[rank:35:2] for rank in (0, 1)], "RASampler", "rows_repeated_by_sampler"),
        # Ranks that each shuffle by themselves have some rows in common, and not the others.
        ([[*range(12)], [*range(6, 18)]], "OwnSampler", "samplers_do_not_share_one_order"),
        ([[*range(24)], [*range(24)]], "OwnSampler", "rows_not_shared_out"),
        ([[*range(24)], [*range(24)][::-1]], "RandomSampler", "rows_not_shared_out"),
    ],
)
def test_a_sampler_may_give_each_row_several_times(
    lists: list[list[int]], sampler: str, said: str, tmp_path: Path
) -> None:
    ranks = [with_pass(rank, own) for rank, own in zip(ranks_of(tmp_path), lists)]
    ranks = [replace(rank, passes=[replace(rank.passes[0], sampler=sampler)]) for rank in ranks]
    assert rows(ranks).message.id == said


@pytest.mark.parametrize(("batches", "answer"), [("aabb", "differs"), ("abcd", "right"), ("aabc", "right")])
def test_workers_that_each_read_every_row_are_named(batches: str, answer: str, tmp_path: Path) -> None:
    """Of an IterableDataset, whose two workers give a batch in turn."""
    ranks = []
    for rank in ranks_of(tmp_path):
        steps = [
            replace(step, micro_batches=[MicroBatchRecord([f"{rank.rank} {batch} {row}" for row in range(3)], [], [0])])
            for step, batch in zip(rank.steps, batches)
        ]
        read = PassRecord(0, None, 3, [None] * len(steps), None, [], len(steps), workers=2)
        ranks.append(replace(rank, steps=steps, passes=[read]))
    finding = rows(ranks)
    assert finding.answer == answer
    assert answer == "right" or finding.message == message("workers_each_read_every_row", workers=2)


@pytest.mark.parametrize(("rows_of_pass", "steps"), [(24, 9), (25, 10), (12, 5)])
def test_the_steps_that_would_see_an_epoch_turn_do(rows_of_pass: int, steps: int, tmp_path: Path) -> None:
    """Of batches of three rows, of which the last may be smaller."""
    rank = ranks_of(tmp_path)[0]
    read = [[3 * step + row for row in range(3)] for step in range(len(rank.steps))]
    left = [*range(3 * len(rank.steps), rows_of_pass)]
    seen = replace(rank, passes=[PassRecord(0, rows_of_pass, 3, read, left, [], 4)])
    assert order([seen]).message.fields["steps"] == steps


@pytest.mark.parametrize(
    ("call", "said"), [("set_epoch", "set_epoch_without_shuffle"), ("sampler", "rows_read_in_order")]
)
def test_set_epoch_of_a_sampler_that_does_not_shuffle(call: Call, said: str, tmp_path: Path) -> None:
    epoch = PassRecord(0, 4, 2, [[0, 2], [4, 6]], [], [], 2, "DistributedSampler")
    rank = replace(ranks_of(tmp_path)[0], passes=[epoch, epoch], calls=[CallRecord(call, "", [], 0)])
    assert order([rank]).message.id == said


@pytest.mark.parametrize(
    ("sampler", "answer", "said"),
    [
        ("DistributedSampler", "differs", "set_epoch_never_called"),
        ("RandomSampler", "warning", "generator_of_shuffling_is_seeded_anew"),
    ],
)
def test_epochs_of_one_order(sampler: str, answer: str, said: str, tmp_path: Path) -> None:
    """What one process does, too, is no difference."""
    rank = ranks_of(tmp_path)[0]
    read = [[2, 0], [3, 1]]
    epoch = PassRecord(0, 4, 2, [*read], [], [], 2, sampler)
    finding = order([replace(rank, passes=[epoch, epoch])])
    assert (finding.answer, finding.message.id) == (answer, said)


@pytest.mark.parametrize(("length", "answer"), [(ROWS, "differs"), (2, "differs"), (1, "right")])
def test_all_rows_in_one_batch_of_each_rank_are_not_shared_out(length: int, answer: str, tmp_path: Path) -> None:
    """Of one row a sampler gives it to each rank, as padding."""
    seen = PassRecord(
        0, length, 256, [[*range(length)]], [], [[f"x {row}"] for row in range(length)], 1, "RandomSampler"
    )
    finding = rows([replace(rank, passes=[seen]) for rank in ranks_of(tmp_path)])
    assert (finding.answer, finding.message.id == "rows_not_shared_out") == (answer, answer == "differs")


@pytest.mark.parametrize(("same", "answer"), [(4, "right"), (10, "differs")])
def test_without_indices_rows_are_compared_by_content(same: int, answer: str, tmp_path: Path) -> None:
    """Of 12 rows a rank; in other steps, so that no step has the same rows on both."""
    ranks = [replace(rank, passes=[]) for rank in ranks_of(tmp_path)]
    every = [row for step in ranks[0].steps for row in step.micro_batches[0].rows]
    others = [row for step in ranks[1].steps for row in step.micro_batches[0].rows]
    moved = [*every[3:], *every[:3]][:same] + others[same:]
    steps = [
        replace(step, micro_batches=[replace(step.micro_batches[0], rows=moved[3 * n : 3 * n + 3])])
        for n, step in enumerate(ranks[1].steps)
    ]
    assert rows([ranks[0], replace(ranks[1], steps=steps)]).answer == answer


@pytest.mark.parametrize(("first", "answer"), [(0, "right"), (6, "differs")])
def test_rows_that_own_datasets_share_are_named(first: int, answer: str, tmp_path: Path) -> None:
    """Each rank has a dataset of 12 rows; rank 1's begins with `first` rows of rank 0's, at other indices."""
    judged(tmp_path, "mean")
    own = [[f"0 {row}" for row in range(12)], [f"0 {row}" for row in reversed(range(first))]]
    own[1] += [f"1 {row}" for row in range(12 - first)]
    ranks = [
        replace(of, passes=[PassRecord(0, 12, 1, [[i] for i in range(12)], [], [[row] for row in own[of.rank]], 12)])
        for of in recorded(tmp_path)
    ]
    found = rows(ranks)
    assert found.answer == answer, found
    assert answer == "right" or found.message.id == "datasets_of_the_ranks_overlap"


@pytest.mark.parametrize(
    ("flipped", "same_kind", "cause"),
    [(6, False, "rows_not_shared_out"), (12, False, ""), (6, True, "")],
    ids=["half are flipped", "other rows", "rows of one kind, by chance"],
)
def test_pictures_without_labels_are_the_same_rows_where_many_are(
    flipped: int, same_kind: bool, cause: str, tmp_path: Path
) -> None:
    """Each rank reads all of its 12 rows; rank 1 has `flipped` of them as other pictures."""
    judged(tmp_path, "mean")
    rows_of = [["a" if same_kind else f"{i}" for i in range(12)] for _ in range(2)]
    rows_of[1][:flipped] = [f"flipped {i}" for i in range(flipped)]
    ranks = [
        replace(
            of, passes=[PassRecord(0, 12, 1, [[i] for i in range(12)], [], [[row] for row in rows_of[of.rank]], 12)]
        )
        for of in recorded(tmp_path)
    ]
    found = rows(ranks)
    assert (found.answer, found.message.id if cause else "") == ("differs" if cause else "right", cause), found


@pytest.mark.parametrize(
    ("labels", "datasets", "answer"),
    [
        ("0123", ("", ""), "differs"),  # augmented pictures of the same rows
        ("0132", ("", ""), "right"),  # other rows, of which some have the same label
        ("0123", ("a", "b"), "right"),
        ("0123", ("a", "a"), "differs"),
    ],
)
def test_a_rank_has_a_dataset_of_its_own_where_the_same_index_is_another_row(
    labels: str, datasets: tuple[str, str], answer: str, tmp_path: Path
) -> None:
    """Each rank reads all of its 12 rows; the first four of each rank are seen."""
    judged(tmp_path, "mean")
    known = [[[f"{rank} {i}", label] for i, label in enumerate(of)] for rank, of in enumerate(("0123", labels))]
    ranks = [
        replace(of, passes=[PassRecord(0, 12, 1, [[i] for i in range(4)], [*range(4, 12)], seen, 4, dataset=name)])
        for of, seen, name in zip(recorded(tmp_path), known, datasets)
    ]
    found = rows(ranks)
    assert found.answer == answer, found


@pytest.mark.parametrize(
    ("pictures", "labels", "answer"),
    [
        ("same", "1230", "differs"),
        ("same", "0123", "right"),
        ("same", "1122", "right"),  # other values, of which none stands for one class
        ("augmented", "1230", "right"),  # perhaps other rows
    ],
)
@pytest.mark.parametrize("third", ["rank", "noise"])  # what else a row holds, on each rank another
def test_classes_that_each_rank_numbers_for_itself(
    pictures: str, labels: str, third: str, answer: str, tmp_path: Path
) -> None:
    """Of 24 rows of 4 classes each rank reads the half that the other one has read in the epoch before."""
    judged(tmp_path, "mean")

    def digests_of(row: int, rank: int) -> list[str]:
        picture = f"{row}" if pictures == "same" else f"{rank} {row}"
        return [picture, ("0123", labels)[rank][row // 2 % 4], f"{rank}" if third == "rank" else f"{rank} {row}"]

    ranks = []
    for rank in recorded(tmp_path):
        halves = [range((rank.rank + epoch) % 2, 24, 2) for epoch in range(2)]
        reads = [
            PassRecord(0, 24, 1, [[row] for row in half], [], [digests_of(row, rank.rank) for row in half], 12)
            for half in halves
        ]
        ranks.append(replace(rank, passes=reads))
    found = rows(ranks)
    assert found.answer == answer, found
    assert answer == "right" or found.message == message("classes_numbered_by_each_rank", classes=4)


@pytest.mark.parametrize(("late", "answer"), [(0, "differs"), (1, "differs"), (2, "right")])
def test_batches_that_rank_0_trains_as_well_are_found_where_rows_come_several_times(
    tmp_path: Path, late: int, answer: str
) -> None:
    judged(tmp_path, "mean", 1)
    first, second = recorded(tmp_path)[:2]
    batches = [[f"{number}", f"{number}", f"{number + 1}"] for number in range(12)]

    def with_rows(rank: ScriptRecord, shift: int) -> ScriptRecord:
        steps = [
            replace(rank.steps[0], micro_batches=[MicroBatchRecord(batches[number + shift])]) for number in range(4)
        ]
        return replace(rank, steps=steps)

    said = rows([with_rows(first, late), with_rows(second, 0)]).message.id
    assert (said == "ranks_train_the_same_batches") == (answer == "differs")


def test_an_epoch_of_content_begins_where_all_rows_have_come(tmp_path: Path) -> None:
    judged(tmp_path, "mean")

    def trained(rank: ScriptRecord, *steps: str) -> ScriptRecord:
        step = rank.steps[0]
        micro = step.micro_batches[0]
        return replace(rank, steps=[replace(step, micro_batches=[replace(micro, rows=list(rows))]) for rows in steps])

    def epochs(first: Sequence[str], second: Sequence[str]) -> list[list[str]]:
        ranks = [trained(rank, *steps) for rank, steps in zip(recorded(tmp_path), (first, second), strict=True)]
        return [["".join(rows) for rows in epoch] for epoch in _epochs_of_content(ranks)]

    assert epochs(["ab", "ef", "gh", "cd"], ["cd", "gh", "ef", "ab"]) == [["abef", "cdgh"], ["ghcd", "efab"]]
    assert epochs(["ab", "cd"], ["ab", "ef"]) == [["abcd", "abef"]]
