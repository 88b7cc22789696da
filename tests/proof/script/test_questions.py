"""The questions that `samestep check` asks of a record, one by one, on records that are made up. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from proof.script.test_script import NAMES, ROWS, SIZE, STEPS, judged
from samestep.proof.script import first_divergence, judge, with_replay
from samestep.proof.script.rows import rows
from samestep.proof.script.updates import rates, schedule, updates, weights
from samestep.records.arrays import write_arrays
from samestep.records.files import read
from samestep.records.record import Record
from samestep.records.results import Divergence
from samestep.records.script import ClipSeen, Finding, LossSeen, PassSeen, ScriptPlan, ScriptRecord


def ranks_of(folder: Path, kind: str = "mean", micro: int = 1, weight: float | None = None) -> list[ScriptRecord]:
    judged(folder, kind, micro, weight)
    return [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(SIZE)]


def found(ranks: Sequence[ScriptRecord], folder: Path, question: str) -> Finding:
    results = judge(ScriptPlan(str(folder), 0.0, "train.py", (), STEPS), ranks, Record(folder))
    (finding,) = [each for each in results.findings if each.question == question]
    return finding


def with_steps(rank: ScriptRecord, **changed: object) -> ScriptRecord:
    return replace(rank, steps=[replace(step, **changed) for step in rank.steps])  # type: ignore[arg-type]


def with_losses(rank: ScriptRecord, *losses: LossSeen) -> ScriptRecord:
    micros = [[replace(micro, losses=list(losses)) for micro in step.micro] for step in rank.steps]
    return replace(rank, steps=[replace(step, micro=micro) for step, micro in zip(rank.steps, micros)])


# Which rows


def with_pass(rank: ScriptRecord, own: Sequence[int], digest: str = "x", length: int = ROWS) -> ScriptRecord:
    digests = [[f"{digest} {index}"] for index in own[:6]]
    seen = PassSeen(0, length, 3, [[index] for index in own[:6]], list(own[6:]), digests, 4, "DistributedSampler")
    return replace(rank, passes=[seen])


@pytest.mark.parametrize(
    ("first", "second", "digests", "answer", "says"),
    [
        (range(0, 24, 2), range(1, 24, 2), "xx", "right", "an epoch reads 24 of 24 rows"),
        (range(12), range(12, 23), "xx", "right", "1 dropped at the end"),
        (range(13), range(12, 24), "xx", "right", "1 of them twice, as padding"),
        (range(12), range(6, 18), "xx", "differs", "do not share one order"),
        (range(8), range(8, 16), "xx", "differs", "8 of 24 rows are read by no rank"),
        (range(24), range(24), "xx", "differs", "each rank reads every row"),
        (range(24), range(24), "xy", "right", "each rank has a dataset of its own"),
        ([0] * 12, range(12, 24), "xx", "unknown", "drawn repeatedly within a rank, as with replacement"),
    ],
    ids=["shared", "dropped", "padded", "overlap", "left out", "all", "own datasets", "replacement"],
)
def test_rows_that_are_shared_out(
    first: Sequence[int], second: Sequence[int], digests: str, answer: str, says: str, tmp_path: Path
) -> None:
    ranks = ranks_of(tmp_path)
    seen = rows([with_pass(ranks[0], [*first], digests[0]), with_pass(ranks[1], [*second], digests[1])])
    assert (seen.answer, says in seen.sentence) == (answer, True), seen


@pytest.mark.parametrize(("length", "answer"), [(ROWS, "differs"), (2, "differs"), (1, "right")])
def test_all_rows_in_one_batch_of_each_rank_are_not_shared_out(length: int, answer: str, tmp_path: Path) -> None:
    """Of one row a sampler gives it to each rank, as padding."""
    seen = PassSeen(0, length, 256, [[*range(length)]], [], [[f"x {row}"] for row in range(length)], 1, "RandomSampler")
    found = rows([replace(rank, passes=[seen]) for rank in ranks_of(tmp_path)])
    assert (found.answer, "each rank reads every row" in found.sentence) == (answer, answer == "differs"), found


@pytest.mark.parametrize(("same", "answer"), [(4, "right"), (10, "differs")])
def test_without_indices_rows_are_compared_by_content(same: int, answer: str, tmp_path: Path) -> None:
    """Of 12 rows a rank; in other steps, so that no step has the same rows on both."""
    ranks = [replace(rank, passes=[]) for rank in ranks_of(tmp_path)]
    every = [row for step in ranks[0].steps for row in step.micro[0].rows]
    others = [row for step in ranks[1].steps for row in step.micro[0].rows]
    moved = [*every[3:], *every[:3]][:same] + others[same:]
    steps = [
        replace(step, micro=[replace(step.micro[0], rows=moved[3 * n : 3 * n + 3])])
        for n, step in enumerate(ranks[1].steps)
    ]
    assert rows([ranks[0], replace(ranks[1], steps=steps)]).answer == answer


# Which rank


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_of_three_ranks_the_odd_one_is_named(odd: int, tmp_path: Path) -> None:
    first = ranks_of(tmp_path)[0]
    three = [with_steps(first, rates=[0.2]) if rank == odd else first for rank in range(3)]
    divergence = rates(three).divergence
    assert divergence and divergence.rank == odd
    three = [with_steps(first, weights={name: -1 for name in NAMES}) if rank == odd else first for rank in range(3)]
    divergence = weights(three).divergence
    assert divergence and divergence.rank == odd


# How the loss enters


def test_terms_may_be_weighted_on_purpose(tmp_path: Path) -> None:
    ranks = [with_losses(rank, LossSeen(0.5, "mean", 3), LossSeen(0.25, "mean", 3)) for rank in ranks_of(tmp_path)]
    seen = found(ranks, tmp_path, "loss weight")
    assert seen.answer == "unknown" and "may be weighted on purpose" in seen.sentence
    both = [with_losses(rank, LossSeen(0.75, "mean", 3), LossSeen(0.25, "mean", 3)) for rank in ranks]
    assert found(both, tmp_path, "loss weight").answer == "right"


def test_losses_that_are_divided_twice_are_named(tmp_path: Path) -> None:
    seen = found(ranks_of(tmp_path, "mean", 3, 1 / 9), tmp_path, "loss weight")
    assert seen.answer == "differs" and "divided by the 3 micro-batches twice" in seen.sentence


def test_a_short_last_window_is_named(tmp_path: Path) -> None:
    """Its two losses are divided by the three of other steps."""
    ranks = ranks_of(tmp_path, "mean", 2, 1 / 3)
    whole = [replace(rank.steps[0], micro=[*rank.steps[0].micro, rank.steps[0].micro[0]]) for rank in ranks]
    longer = [replace(rank, steps=[*rank.steps, step]) for rank, step in zip(ranks, whole)]
    for rank in range(SIZE):
        write_arrays(tmp_path / f"rank{rank}.step{STEPS}.npz", {f"taken {name}": np.zeros(30) for name in NAMES})
    seen = found(longer, tmp_path, "loss weight")
    assert seen.answer == "differs" and "the last window has 2 micro-batches of 3" in seen.sentence


@pytest.mark.parametrize(
    ("kind", "micro", "answer", "says"),
    [
        ("no known mistake", 1, "unknown", "several optimizers share"),
        ("lost", 3, "unknown", "several optimizers share"),  # what another one's backward() left may be cleared
        ("never reduced", 1, "differs", "never reduced"),  # all that was computed since the step before, on this rank
    ],
)
def test_several_optimizers_are_no_proof(kind: str, micro: int, answer: str, says: str, tmp_path: Path) -> None:
    two = [
        replace(rank, steps=[replace(step, optimizer=number % 2) for number, step in enumerate(rank.steps)])
        for rank in ranks_of(tmp_path, kind, micro)
    ]
    seen = found(two, tmp_path, "gradient")
    assert seen.answer == answer and says in seen.sentence, seen


# Clipping


def clipped(folder: Path, norm: float, scale: float | None = None, clips: Sequence[ClipSeen] = ()) -> Finding:
    """The answer about a gradient of norm 4 that is clipped to `norm`, where 0.5 is allowed."""
    ranks = ranks_of(folder)
    before = {name: np.eye(1, 30)[0] * 2.0 for name in NAMES}
    arrays = {f"unclipped {name}": value for name, value in before.items()}
    arrays |= {f"taken {name}": value * norm / 4 for name, value in before.items()}
    for rank in range(SIZE):
        for step in range(STEPS):
            write_arrays(folder / f"rank{rank}.step{step}.npz", arrays)
    clips = clips or [ClipSeen(1, 4, 4, 0.5)]
    return found([with_steps(rank, clips=list(clips), scale=scale) for rank in ranks], folder, "clipping")


@pytest.mark.parametrize(
    ("norm", "scale", "clips", "says"),
    [
        (0.5, None, (), ""),
        (0.51, None, (), "clipped by another norm than that of the whole gradient"),
        (0.25, 2.0, (), "scaler.unscale_(optimizer) belongs before the clipping"),
        (0.5, None, (ClipSeen(1, 2, 4, 0.5), ClipSeen(1, 2, 4, 0.5)), "clipped in 2 parts"),
        (0.5, None, (ClipSeen(0, 4, 4, 0.5), ClipSeen(1, 4, 4, 0.5)), "2 times a step"),
        (4.0, None, (ClipSeen(1, 4, 4, None),), ""),  # by value
        (4.0, None, (ClipSeen(1, 2, 4, 0.5),), ""),  # some of the parameters, on purpose
    ],
)
def test_how_a_gradient_was_clipped(
    norm: float, scale: float | None, clips: Sequence[ClipSeen], says: str, tmp_path: Path
) -> None:
    seen = clipped(tmp_path, norm, scale, clips)
    assert seen.answer == ("differs" if says else "right") and says in seen.sentence, seen


def test_a_gradient_that_is_clipped_on_the_way_is_named_with_its_micro_batch(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, "no known mistake", 3)
    early = [ClipSeen(2, 4, 4, 0.5), ClipSeen(3, 4, 4, 0.5)]
    seen = found([with_steps(rank, clips=early) for rank in ranks], tmp_path, "gradient")
    assert seen.answer == "differs" and "clipped after micro-batch 1 of 3, before" in seen.sentence


# Steps


def advancing(rank: ScriptRecord, by: int) -> ScriptRecord:
    return replace(rank, steps=[replace(step, schedules=[by * n]) for n, step in enumerate(rank.steps)])


@pytest.mark.parametrize(
    ("by", "libraries", "answer", "says"),
    [
        (0, [], "right", "advanced 0 times in 4 steps"),
        (1, [], "right", "advanced 3 times in 4 steps"),
        (2, [], "differs", "once for each rank"),
        (2, ["accelerate"], "unknown", "as Accelerate's prepared schedulers do"),
        (3, ["accelerate"], "differs", "several times a step"),
    ],
)
def test_how_often_a_schedule_advances(by: int, libraries: list[str], answer: str, says: str, tmp_path: Path) -> None:
    ranks = [replace(advancing(rank, by), libraries=libraries) for rank in ranks_of(tmp_path)]
    seen = schedule(ranks)
    assert seen.answer == answer and says in seen.sentence


def test_small_updates_may_vanish_in_16_bits(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, "one stays")
    assert updates(ranks, Record(tmp_path)).answer == "differs"
    assert updates([with_steps(rank, dtypes=["bfloat16"]) for rank in ranks], Record(tmp_path)).answer == "unknown"


# The whole


@pytest.mark.parametrize("question", ["steps", "initial weights", "gradient", "loss weight", "weights"])
def test_without_an_answer_that_a_proof_needs_nothing_is_proven(question: str, tmp_path: Path) -> None:
    results = judged(tmp_path, "mean")
    assert with_replay(results, []).answer == "right"
    without = [each for each in results.findings if each.question != question]
    assert with_replay(replace(results, findings=without), []).answer == "unknown"
    told = [replace(each, answer="unknown") if each.question == question else each for each in results.findings]
    assert with_replay(replace(results, findings=told), []).answer == "unknown"


def test_the_first_divergence_is_that_of_the_earliest_step() -> None:
    def at(question: str, step: int | None) -> Finding:
        return Finding(question, "differs", "", Divergence("script", step, question, None, None, None, None))

    several = [at("a", 2), at("b", 1), at("c", 1)]
    first = first_divergence(several)
    assert first and first.quantity == "b"
    first = first_divergence([*several, at("d", None)])
    assert first and first.quantity == "d"
    assert first_divergence([Finding("a", "right", "")]) is None


def test_buffers_of_each_rank_are_noted_and_the_share_of_recording_is_told(tmp_path: Path) -> None:
    ranks = [replace(rank, buffers={"bn.running_mean": rank.rank}, notes=["seen"]) for rank in ranks_of(tmp_path)]
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), STEPS), ranks, Record(tmp_path))
    note = "bn.running_mean is not the same on all ranks: BatchNorm's statistics are each rank's own"
    assert results.notes == ["seen", note]
    assert results.record_share == pytest.approx(0.1 / (0.1 * STEPS))
