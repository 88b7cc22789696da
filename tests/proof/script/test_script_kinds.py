"""The judge of a user's script on what some kinds of scripts record: own datasets, optimizers that hold no gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from proof.script.test_script import NAMES, SIZE, STEPS, judged
from samestep.message import Message, message
from samestep.proof.script.gradients import gradient
from samestep.proof.script.loss_weight import accumulated_targets, several_losses
from samestep.proof.script.replay import drifts
from samestep.proof.script.rows import rows
from samestep.proof.script.updates import left_behind, step_counts, unequal_calls, updates, why_unequal_calls
from samestep.records.arrays import write_arrays
from samestep.records.files import read
from samestep.records.record import Record
from samestep.records.script import (
    COMPRESSED,
    ClosureRecord,
    LossRecord,
    MicroBatchRecord,
    PassRecord,
    ScriptPlan,
    ScriptRecord,
)


def recorded(folder: Path) -> list[ScriptRecord]:
    return [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(SIZE)]


def test_a_held_parameter_may_take_steps_below_its_resolution(tmp_path: Path) -> None:
    assert judged(tmp_path, "one stays").answer == "differs"
    ranks = [replace(of, steps=[replace(step, held=NAMES) for step in of.steps]) for of in recorded(tmp_path)]
    assert updates(ranks, Record(tmp_path)).answer == "right"


def test_gradients_that_never_come_to_the_optimizer_are_named(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    for rank in range(SIZE):
        for step in range(STEPS):
            write_arrays(tmp_path / f"rank{rank}.step{step}.npz", {})
    ranks = [replace(of, steps=[replace(step, lost=NAMES, moved=[]) for step in of.steps]) for of in recorded(tmp_path)]
    found = updates(ranks, Record(tmp_path))
    assert (found.answer, found.message.id) == ("differs", "gradients_never_reach_the_optimizer")
    moved = [replace(of, steps=[replace(step, moved=NAMES) for step in of.steps]) for of in ranks]
    assert updates(moved, Record(tmp_path)).answer == "right"  # an optimizer of flat copies


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


def test_gradients_that_are_no_numbers_are_not_passed(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    for rank in range(SIZE):
        of = dict.fromkeys((f"{kind} {name}" for name in NAMES for kind in ("taken", "local 0")), np.full(30, np.nan))
        write_arrays(tmp_path / f"rank{rank}.step2.npz", of)
    found = gradient(recorded(tmp_path), Record(tmp_path))[0]
    assert found.answer == "unknown"
    assert found.message == message("gradient_of_rank_not_finite", parameter="a.weight", rank=0, step=2)


@pytest.mark.parametrize(
    ("apart", "found"),
    [
        ([2e-9, 2e-9, 2e-9, 2e-7, 1.4e-4, 2e-2], True),  # a transformer at a high rate
        ([2e-9, 2e-9, 2e-2], False),
        ([2e-9, 2e-9, 1e-3, 2e-2], False),
        ([1e-5, 1e-4, 1e-3, 2e-2], False),
    ],
)
def test_rounding_that_grows_is_no_mistake(apart: list[float], found: bool) -> None:
    assert drifts(apart) is found


def micro_batch(weight: float, reduction: str, targets: int, rows: int = 2) -> MicroBatchRecord:
    return MicroBatchRecord([f"row {number}" for number in range(rows)], [LossRecord(weight, reduction, targets)])


@pytest.mark.parametrize(
    ("micros", "found"),
    [
        ([micro_batch(0.5, "mean", 2), micro_batch(0.5, "mean", 8)], (1, 0.25)),  # each micro-batch's own mean
        ([micro_batch(1.0, "mean", 4)] * 2 + [micro_batch(1.0, "mean", 5)], (2, 0.8)),
        ([micro_batch(0.5, "sum", 2), micro_batch(0.125, "sum", 8)], (1, 0.25)),  # a sum, divided by its own targets
        ([micro_batch(0.1, "sum", 2), micro_batch(0.1, "sum", 8)], None),  # divided by the targets of all
        ([micro_batch(0.2, "mean", 2), micro_batch(0.8, "mean", 8)], None),  # means, weighted by their targets
        ([micro_batch(0.5, "mean", 8), micro_batch(0.5, "mean", 8)], None),
        ([micro_batch(0.5, "mean", 8, rows=2), micro_batch(0.5, "mean", 4, rows=1)], None),  # a shorter last batch
        ([micro_batch(0.5, "unknown", 0), micro_batch(0.5, "mean", 8)], None),
        (
            [
                MicroBatchRecord(["row"], [LossRecord(1.0, "mean", 2), LossRecord(0.1, "sum", 9)]),
                micro_batch(0.5, "mean", 8, 1),
            ],
            None,
        ),
        ([micro_batch(0.5, "mean", 2, rows=0), micro_batch(0.5, "mean", 8, rows=0)], None),  # no forward was seen
        ([], None),
    ],
)
def test_a_target_weighs_the_same_in_each_accumulated_micro_batch(
    micros: list[MicroBatchRecord], found: tuple[int, float] | None
) -> None:
    assert accumulated_targets(micros) == (found and (found[0], pytest.approx(found[1])))


@pytest.mark.parametrize(("counts", "answer"), [((2, 8), "differs"), ((8, 8), "right")])
def test_a_mean_over_micro_batches_of_unequal_targets_is_named(
    counts: tuple[int, int], answer: str, tmp_path: Path
) -> None:
    """Both ranks have the same numbers, so that only the micro-batches of one rank tell."""
    judged(tmp_path, "mean", 2)
    micros = [micro_batch(0.5, "mean", count) for count in counts]
    ranks = [replace(of, steps=[replace(step, micro_batches=micros) for step in of.steps]) for of in recorded(tmp_path)]
    found = gradient(ranks, Record(tmp_path))[1]
    assert (found.question, found.answer) == ("loss weight", answer), found
    cause = message("mean_of_means_over_micro_batches", micro_batch=1, ratio=0.25)
    assert answer == "right" or found.message == cause


@pytest.mark.parametrize(
    ("calls", "done", "step"),
    [
        (([3, 3], [3, 3]), (2, 2), None),
        (([3, 4], [3, 3]), (2, 2), 1),
        (([3, 4], [3, 3]), (2, 1), None),  # rank 1 goes on
        (([3, 4], [3, 5]), (2, 1), 1),
        (([3, 4], [3, 5]), (1, 1), None),  # both go on
        (([3, 4], [3]), (2, 1), None),  # the script has ended on rank 1
        (([2, 1], [3]), (1, 0), 0),
        ((), (), None),
    ],
)
def test_a_closure_is_called_as_often_on_each_rank(
    calls: tuple[list[int], ...], done: tuple[int, ...], step: int | None
) -> None:
    assert unequal_calls([*map(ClosureRecord, calls, done)]) == step


def test_a_closure_that_is_called_more_often_on_one_rank_is_named(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    ranks = [
        replace(of, steps=[replace(step, calls=5 + (of.rank and number == 2)) for number, step in enumerate(of.steps)])
        for of in recorded(tmp_path)
    ]
    found = step_counts(ScriptPlan("", 0.0, "train.py", (), STEPS), ranks)
    assert found.answer == "differs" and found.divergence and found.divergence.step == 2
    calls = [message("calls_on_rank", calls=5, rank=0), message("calls_on_rank", calls=6, rank=1)]
    assert found.message == message("closure_called_unequally", step=2, calls=calls)
    cause = why_unequal_calls([ClosureRecord([5], 1), ClosureRecord([6], 0)], 0)
    assert cause.fields["calls"][1] == message("calls_or_more_on_rank", calls=6, rank=1)


def term(kind: str, row: str, read: int, found: str = "mean") -> MicroBatchRecord:
    return MicroBatchRecord([row], [LossRecord(1.0, found, 3, kind)], [read])


@pytest.mark.parametrize(
    ("micros", "several"),
    [
        ([term("NllLoss", "a", 0), term("NllLoss", "b", 0)], False),
        ([term("NllLoss", "a", 0), term("NllLoss", "b", 1)], False),  # the loader's next epoch has begun
        ([term("NllLoss", "a", 0), term("NllLoss", "b", 2)], True),  # another loader's batch
        ([term("NllLoss", "a", 0), term("NllLoss", "a", 0)], True),  # the same rows again
        ([term("NllLoss", "a", 0), term("MseLoss", "b", 0)], True),
        ([MicroBatchRecord([]), MicroBatchRecord([])], False),  # no forward was seen
    ],
)
def test_losses_with_a_backward_each_are_no_accumulation(micros: list[MicroBatchRecord], several: bool) -> None:
    assert several_losses(micros, [0, 0, 1]) is several


@pytest.mark.parametrize(
    ("kinds", "answer"), [(("NllLoss", "NllLoss"), "differs"), (("NllLoss", "MseLoss"), "unknown")]
)
def test_losses_with_a_backward_each_may_have_any_weights(kinds: tuple[str, str], answer: str, tmp_path: Path) -> None:
    judged(tmp_path, "mean", 2, 1.0)
    ranks = [
        replace(
            of,
            steps=[
                replace(
                    s,
                    micro_batches=[
                        replace(m, losses=[LossRecord(1.0, "mean", 3, k)]) for m, k in zip(s.micro_batches, kinds)
                    ],
                )
                for s in of.steps
            ],
        )
        for of in recorded(tmp_path)
    ]
    found = gradient(ranks, Record(tmp_path))
    assert [each.answer for each in found] == ["right", answer]


@pytest.mark.parametrize(
    ("weights", "cause"),
    [
        ((1.0, 1.0), message("ranks_accumulate_different_numbers", micro_batches=[1, 2])),
        ((1.0, 0.5), message("mean_of_means_over_ranks", rank=1, ratio=0.5)),  # each divides by its own number
        ((2 / 3, 2 / 3), None),  # of all three
    ],
)
def test_ranks_that_accumulate_different_numbers_are_named(
    weights: tuple[float, float], cause: Message | None, tmp_path: Path
) -> None:
    judged(tmp_path, "mean", 2)
    for step in range(STEPS):  # rank 0 has one micro-batch of the two
        arrays = [Record(tmp_path).arrays(f"step{step}", rank) for rank in range(SIZE)]
        arrays[0] |= {f"local 1 {name}": np.zeros(30) for name in NAMES}
        mean = {name: sum(a[f"local {n} {name}"] for a in arrays for n in range(2)) / SIZE for name in NAMES}
        for rank in range(SIZE):
            write_arrays(tmp_path / f"rank{rank}.step{step}.npz", arrays[rank] | {f"taken {n}": mean[n] for n in NAMES})
    ranks = []
    for of, weight in zip(recorded(tmp_path), weights):
        micros = [
            [replace(m, losses=[LossRecord(weight, "mean", 3)]) for m in s.micro_batches[: of.rank + 1]]
            for s in of.steps
        ]
        ranks.append(replace(of, steps=[replace(s, micro_batches=m) for s, m in zip(of.steps, micros)]))
    found = gradient(ranks, Record(tmp_path))
    assert [each.answer for each in found] == ["right", "differs" if cause else "right"], found
    assert cause is None or found[1].message == cause


def test_gradients_that_are_removed_just_before_the_step_are_named(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    ranks = [
        replace(of, steps=[replace(step, micro_batches=[], cleared=1) for step in of.steps])
        for of in recorded(tmp_path)
    ]
    assert gradient(ranks, Record(tmp_path))[0].message == message("gradients_removed_before_the_step")


@pytest.mark.parametrize(
    ("steps", "ended", "behind"),
    [
        ([8, 0], {0}, {1: 0}),
        ([7, 8, 6], {1}, {0: 7, 2: 6}),
        ([3, 3], set(), {}),  # another loss of a peer
        ([8, 8], {0}, {}),
    ],
)
def test_ranks_that_step_less_often_are_named(steps: list[int], ended: set[int], behind: dict[int, int]) -> None:
    took = [message("rank_took_only", rank=rank, steps=taken) for rank, taken in behind.items()]
    expected = message("ranks_left_behind", rank=min(ended, default=0), steps=8, behind=took)
    assert left_behind(steps, ended) == (expected if behind else None)


@pytest.mark.parametrize(("kind", "answer"), [("no known mistake", "unknown"), ("never reduced", "differs")])
def test_gradients_that_a_hook_compresses_are_not_judged(kind: str, answer: str, tmp_path: Path) -> None:
    judged(tmp_path, kind)
    ranks = [
        replace(of, steps=[replace(s, dtypes=["float32", COMPRESSED]) for s in of.steps]) for of in recorded(tmp_path)
    ]
    found = gradient(ranks, Record(tmp_path))[0]
    assert found.answer == answer and (found.message.id == "gradients_compressed_by_hook") is (answer == "unknown")


def test_gradients_of_one_of_two_optimizers_that_are_never_cleared_are_named(tmp_path: Path) -> None:
    """Both step after one backward(): the second one's step has no micro-batch."""
    judged(tmp_path, "not cleared")
    ranks = recorded(tmp_path)
    for rank in range(SIZE):
        for step in reversed(range(STEPS)):
            write_arrays(tmp_path / f"rank{rank}.step{2 * step}.npz", Record(tmp_path).arrays(f"step{step}", rank))
        for step in range(STEPS):
            write_arrays(tmp_path / f"rank{rank}.step{2 * step + 1}.npz", {"taken other": np.ones(3)})
    both = [[(step, replace(step, optimizer=1, micro_batches=[])) for step in of.steps] for of in ranks]
    ranks = [replace(of, steps=[step for pair in pairs for step in pair]) for of, pairs in zip(ranks, both)]
    found = gradient(ranks, Record(tmp_path))[0]
    assert found.divergence and found.divergence.step == 2
    assert found.message == message("gradients_never_cleared")


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
