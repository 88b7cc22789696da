"""With which weight losses enter the gradient, on records that are made up. It needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from judge.test_script import NAMES, SIZE, STEPS, found, judged, ranks_of, recorded, with_losses, with_steps
from samestep.judge.gradients import gradient
from samestep.judge.loss_weight import accumulated_targets, several_losses
from samestep.message import Message, message
from samestep.records.record import Record
from samestep.records.script import LossRecord, MicroBatchRecord
from samestep.records.tensor_files import write_arrays


def test_terms_may_be_weighted_on_purpose(tmp_path: Path) -> None:
    ranks = [with_losses(rank, LossRecord(0.5, "mean", 3), LossRecord(0.25, "mean", 3)) for rank in ranks_of(tmp_path)]
    seen = found(ranks, tmp_path, "loss weight")
    assert (seen.answer, seen.message.id) == ("unknown", "losses_have_an_unknown_factor")
    assert seen.message.fields["on_purpose"] == message("terms_may_be_weighted_on_purpose")
    both = [with_losses(rank, LossRecord(0.75, "mean", 3), LossRecord(0.25, "mean", 3)) for rank in ranks]
    assert found(both, tmp_path, "loss weight").answer == "right"


def test_losses_that_are_divided_twice_are_named(tmp_path: Path) -> None:
    seen = found(ranks_of(tmp_path, "mean", 3, 1 / 9), tmp_path, "loss weight")
    assert seen.answer == "differs"
    assert seen.message == message("losses_divided_by_accumulation_twice", micro_batches=3)


@pytest.mark.parametrize(
    ("weights", "answer", "said"),
    [
        ((1.0, 1.0, 1 / 3), "differs", "some_losses_not_divided_by_accumulation"),
        ((1.0, 1 / 3, 1 / 2), "unknown", "losses_have_an_unknown_factor"),
        # Two losses may weigh one and a half on purpose.
        ((1.0, 1 / 2), "unknown", "losses_have_an_unknown_factor"),
    ],
)
def test_losses_of_which_some_are_not_divided_are_named(
    weights: tuple[float, ...], answer: str, said: str, tmp_path: Path
) -> None:
    ranks = ranks_of(tmp_path, "mean", len(weights), 1.0)
    ranks = [
        with_steps(
            rank,
            micro_batches=[
                replace(batch, losses=[LossRecord(weight, "mean", 3)])
                for batch, weight in zip(rank.steps[0].micro_batches, weights)
            ],
        )
        for rank in ranks
    ]
    seen = found(ranks, tmp_path, "loss weight")
    assert (seen.answer, seen.message.id) == (answer, said)
    if answer == "differs":
        assert seen.message.fields == {"undivided": [0, 1], "micro_batches": 3}


def test_a_short_last_window_is_named(tmp_path: Path) -> None:
    """Its two losses are divided by the three of other steps."""
    ranks = ranks_of(tmp_path, "mean", 2, 1 / 3)
    whole = [
        replace(rank.steps[0], micro_batches=[*rank.steps[0].micro_batches, rank.steps[0].micro_batches[0]])
        for rank in ranks
    ]
    longer = [replace(rank, steps=[*rank.steps, step]) for rank, step in zip(ranks, whole)]
    for rank in range(SIZE):
        write_arrays(tmp_path / f"rank{rank}.step{STEPS}.npz", {f"taken {name}": np.zeros(30) for name in NAMES})
    seen = found(longer, tmp_path, "loss weight")
    assert seen.answer == "differs"
    assert seen.message == message("short_window_divided_by_full_one", micro_batches=2, most=3)


@pytest.mark.parametrize(
    ("terms", "answer"),
    [
        ([LossRecord(1.0, "mean", 3), LossRecord(0.3, "mean", 3, factors=[0.3])], "differs"),
        ([LossRecord(0.5, "mean", 3, factors=[0.5]), LossRecord(0.15, "mean", 3, factors=[0.3, 0.5])], "right"),
        ([LossRecord(1 / 3, "sum", 3, factors=[1 / 3])], "differs"),  # a mask's sum, divided by what it leaves
        ([LossRecord(1 / 3, "sum", 3, factors=[2 / 3, 0.5])], "unknown"),  # two values of a row, divided by hand
        ([LossRecord(1.0, "sum", 3)], "unknown"),
    ],
)
def test_an_accumulation_of_weighted_losses_that_is_not_divided_is_named(
    terms: list[LossRecord], answer: str, tmp_path: Path
) -> None:
    ranks = [with_losses(rank, *terms) for rank in ranks_of(tmp_path, "mean", 2, 0.5)]
    seen = found(ranks, tmp_path, "loss weight")
    assert seen.answer == answer
    assert answer != "differs" or seen.message == message("loss_not_divided_by_accumulation", micro_batches=2)


def test_a_small_difference_hides_no_large_one(tmp_path: Path) -> None:
    """Rank 1 has one target less in step 0; in step 2 the losses are twice what they should be."""
    ranks = ranks_of(tmp_path)
    uneven = [with_losses(rank, LossRecord(1.0, "mean", 100 - rank.rank)) for rank in ranks]
    small = found(uneven, tmp_path, "loss weight")
    assert small.message == message("mean_of_means_over_ranks", rank=1, other=0, ratio=pytest.approx(1.0101, abs=1e-4))
    doubled = [with_losses(rank, LossRecord(2.0, "mean", 100)) for rank in ranks]
    both = [replace(rank, steps=[*rank.steps[:2], *twice.steps[2:]]) for rank, twice in zip(uneven, doubled)]
    seen = found(both, tmp_path, "loss weight")
    assert seen.message == message("loss_multiplied_by_ranks", ranks=2)
    assert seen.divergence and seen.divergence.step == 2


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


@pytest.mark.parametrize(("forwards", "is_stage", "several"), [(2, True, False), (2, False, True), (1, True, True)])
def test_forward_passes_that_all_come_first(forwards: int, is_stage: bool, several: bool) -> None:
    """Those of a pipeline's micro-batches do; of other scripts they have losses of their own."""
    batches = [MicroBatchRecord(["a", "b"], passes=[0], forwards=forwards), MicroBatchRecord([])]
    assert several_losses(batches, [0, 0, 1], is_stage) is several


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
        (
            (1.0, 0.5),
            message("micro_batch_skipped_on_some_ranks", micro_batches=[1, 2]),
        ),  # each divides by its own number
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


def test_the_first_step_of_the_largest_mistake_is_told(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    ranks = []
    for rank in recorded(tmp_path):
        counts = [10 + rank.rank * step for step in range(STEPS)]  # of a step, the more the later it is
        steps = [
            replace(
                step,
                micro_batches=[replace(m, losses=[LossRecord(1.0, "mean", count)]) for m in step.micro_batches],
            )
            for step, count in zip(rank.steps, counts)
        ]
        ranks.append(replace(rank, steps=steps))
    finding = gradient(ranks, Record(tmp_path))[1]
    assert finding.message.id == "mean_of_means_over_ranks"
    assert finding.divergence and finding.divergence.step == 1
