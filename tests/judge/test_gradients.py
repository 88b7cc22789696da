"""How gradients are reduced and clipped, on records that are made up. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from judge.test_script import NAMES, SIZE, STEPS, found, judged, ranks_of, recorded, with_steps
from samestep.judge.gradients import gradient
from samestep.message import Message, message
from samestep.records.findings import Finding
from samestep.records.record import Record
from samestep.records.script import COMPRESSED, ClipRecord
from samestep.records.tensor_files import write_arrays


@pytest.mark.parametrize(
    ("kind", "micro_batches", "answer", "said"),
    [
        ("no known mistake", 1, "unknown", "optimizers_share_a_backward"),
        ("lost", 3, "unknown", "optimizers_share_a_backward"),  # what another one's backward() left may be cleared
        # All that was computed since the step before, on this rank.
        ("never reduced", 1, "differs", "ranks_never_reduce_gradients"),
    ],
)
def test_several_optimizers_are_no_proof(kind: str, micro_batches: int, answer: str, said: str, tmp_path: Path) -> None:
    two = [
        replace(rank, steps=[replace(step, optimizer=number % 2) for number, step in enumerate(rank.steps)])
        for rank in ranks_of(tmp_path, kind, micro_batches)
    ]
    seen = found(two, tmp_path, "gradient")
    assert (seen.answer, seen.message.id) == (answer, said)


def clipped(folder: Path, norm: float, scale: float | None = None, clips: Sequence[ClipRecord] = ()) -> Finding:
    """The answer about a gradient of norm 4 that is clipped to `norm`, where 0.5 is allowed."""
    ranks = ranks_of(folder, "mean", 2)
    before = {name: np.eye(1, 30)[0] * 2.0 for name in NAMES}
    arrays = {f"unclipped {name}": value for name, value in before.items()}
    arrays |= {f"taken {name}": value * norm / 4 for name, value in before.items()}
    for rank in range(SIZE):
        for step in range(STEPS):
            write_arrays(folder / f"rank{rank}.step{step}.npz", arrays)
    clips = clips or [ClipRecord(2, 4, 4, 0.5)]
    return found([with_steps(rank, clips=list(clips), scale=scale) for rank in ranks], folder, "clipping")


@pytest.mark.parametrize(
    ("norm", "scale", "clips", "cause"),
    [
        (0.5, None, (), None),
        (0.51, None, (), message("clipped_by_another_norm")),
        (0.25, 2.0, (), message("clipped_while_scaled", scale=2.0)),
        (0.0, 2.0**127, (), message("clipped_while_scaled", scale=2.0**127)),  # too small for a float32
        (0.5, None, (ClipRecord(2, 2, 4, 0.5), ClipRecord(2, 2, 4, 0.5)), message("clipped_in_parts", parts=2)),
        (
            0.5,
            None,
            (ClipRecord(1, 4, 4, 0.5), ClipRecord(2, 4, 4, 0.5)),
            message("clipped_after_each_micro_batch", clips=2),
        ),
        (
            0.5,
            None,
            (ClipRecord(1, 4, 4, 0.5),),
            message("clipped_before_last_micro_batch", micro_batch=0, micro_batches=2),
        ),
        (4.0, None, (ClipRecord(0, 0, 0, 0.5),), message("clipped_before_backward")),
        (0.5, None, (ClipRecord(0, 0, 0, 0.5), ClipRecord(2, 4, 4, 0.5)), None),  # the first one does nothing
        (4.0, None, (ClipRecord(2, 4, 4, None),), None),  # by value
        (4.0, None, (ClipRecord(2, 2, 4, 0.5),), None),  # some of the parameters, on purpose
    ],
)
def test_how_a_gradient_was_clipped(
    norm: float, scale: float | None, clips: Sequence[ClipRecord], cause: Message | None, tmp_path: Path
) -> None:
    seen = clipped(tmp_path, norm, scale, clips)
    said = cause or message("clipped_once_a_step", steps=STEPS)
    assert (seen.answer, seen.message) == ("differs" if cause else "right", said)


def test_a_gradient_that_is_clipped_on_the_way_is_named_with_its_micro_batch(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, "no known mistake", 3)
    early = [ClipRecord(2, 4, 4, 0.5), ClipRecord(3, 4, 4, 0.5)]
    seen = found([with_steps(rank, clips=early) for rank in ranks], tmp_path, "gradient")
    assert seen.answer == "differs"
    assert seen.message == message("clipped_before_last_micro_batch", micro_batch=1, micro_batches=3)


def test_gradients_that_are_no_numbers_are_not_passed(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    for rank in range(SIZE):
        of = dict.fromkeys((f"{kind} {name}" for name in NAMES for kind in ("taken", "local 0")), np.full(30, np.nan))
        write_arrays(tmp_path / f"rank{rank}.step2.npz", of)
    found = gradient(recorded(tmp_path), Record(tmp_path))[0]
    assert found.answer == "unknown"
    assert found.message == message("gradient_of_rank_not_finite", parameter="a.weight", rank=0, step=2)


def test_gradients_that_are_removed_just_before_the_step_are_named(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    ranks = [
        replace(of, steps=[replace(step, micro_batches=[], cleared=1) for step in of.steps])
        for of in recorded(tmp_path)
    ]
    assert gradient(ranks, Record(tmp_path))[0].message == message("gradients_removed_before_the_step")


@pytest.mark.parametrize(
    ("moved", "answer", "said"),
    [([], "differs", "gradients_removed_before_the_step"), (NAMES, "unknown", "no_gradient_seen")],
)
def test_steps_before_the_backward_pass_are_named(moved: list[str], answer: str, said: str, tmp_path: Path) -> None:
    ranks = [
        replace(
            rank, steps=[replace(step, cleared=int(number > 0), moved=moved) for number, step in enumerate(rank.steps)]
        )
        for rank in ranks_of(tmp_path)
    ]
    for rank in range(SIZE):
        for step in range(STEPS):
            write_arrays(tmp_path / f"rank{rank}.step{step}.npz", {})
    seen = found(ranks, tmp_path, "gradient")
    assert (seen.answer, seen.message.id) == (answer, said)


def test_gradients_that_are_clipped_after_the_step_are_a_warning(tmp_path: Path) -> None:
    late = [with_steps(rank, late_clips=1) for rank in ranks_of(tmp_path)]
    seen = found(late, tmp_path, "clipping")
    assert (seen.answer, seen.message) == ("warning", message("clipped_after_the_step", clips=STEPS))


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


def test_a_reduction_that_is_not_awaited_explains_a_gradient_that_is_no_mean(tmp_path: Path) -> None:
    ranks = [with_steps(rank, unawaited=2) for rank in ranks_of(tmp_path, "no known mistake")]
    assert found(ranks, tmp_path, "gradient").message == message("asynchronous_reduction_not_awaited", reductions=2)
    right = [with_steps(rank, unawaited=2) for rank in ranks_of(tmp_path)]
    assert found(right, tmp_path, "gradient").answer == "right"


def test_an_optimizer_that_reduces_a_part_of_the_gradients_leaves_the_others_out(tmp_path: Path) -> None:
    ranks = [
        with_steps(rank, weights={name: rank.rank if name == NAMES[0] else 7 for name in NAMES})
        for rank in ranks_of(tmp_path, "never reduced")
    ]
    said = message("parameters_left_out_of_reduction", left_out=1, parameters=len(NAMES))
    assert found(ranks, tmp_path, "gradient").message == said
