"""The questions that `samestep check` asks of a record, one by one, on records that are made up. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from proof.script.test_script import NAMES, ROWS, SIZE, STEPS, finding_of, judged
from samestep.message import Message, message
from samestep.proof.script import first_divergence, judge, with_replay
from samestep.proof.script.rows import rows
from samestep.proof.script.updates import rates, schedule, updates, weights
from samestep.records.arrays import write_arrays
from samestep.records.files import read
from samestep.records.record import Record
from samestep.records.results import Divergence
from samestep.records.script import ClipRecord, Finding, LossRecord, PassRecord, Question, ScriptPlan, ScriptRecord


def ranks_of(
    folder: Path, kind: str = "mean", micro_batches: int = 1, weight: float | None = None
) -> list[ScriptRecord]:
    judged(folder, kind, micro_batches, weight)
    return [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(SIZE)]


def found(ranks: Sequence[ScriptRecord], folder: Path, question: Question) -> Finding:
    return finding_of(judge(ScriptPlan(str(folder), 0.0, "train.py", (), STEPS), ranks, Record(folder)), question)


def with_steps(rank: ScriptRecord, **changed: object) -> ScriptRecord:
    return replace(rank, steps=[replace(step, **changed) for step in rank.steps])  # type: ignore[arg-type]


def with_losses(rank: ScriptRecord, *losses: LossRecord) -> ScriptRecord:
    batches = [[replace(batch, losses=list(losses)) for batch in step.micro_batches] for step in rank.steps]
    return replace(rank, steps=[replace(step, micro_batches=of_step) for step, of_step in zip(rank.steps, batches)])


# Which rows


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
        (range(12), range(6, 18), "xx", "differs", message("samplers_do_not_share_one_order")),
        (range(8), range(8, 16), "xx", "differs", message("rows_read_by_no_rank", missing=8, rows=24)),
        (range(24), range(24), "xx", "differs", message("rows_not_shared_out")),
        (range(24), range(24), "xy", "right", message("each_rank_has_its_own_dataset")),
        ([0] * 12, range(12, 24), "xx", "unknown", message("rows_drawn_with_replacement", rows=11)),
    ],
    ids=["shared", "dropped", "padded", "overlap", "left out", "all", "own datasets", "replacement"],
)
def test_rows_that_are_shared_out(
    first: Sequence[int], second: Sequence[int], digests: str, answer: str, said: Message, tmp_path: Path
) -> None:
    ranks = ranks_of(tmp_path)
    finding = rows([with_pass(ranks[0], [*first], digests[0]), with_pass(ranks[1], [*second], digests[1])])
    assert (finding.answer, finding.message) == (answer, said)


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


# Clipping


def clipped(folder: Path, norm: float, scale: float | None = None, clips: Sequence[ClipRecord] = ()) -> Finding:
    """The answer about a gradient of norm 4 that is clipped to `norm`, where 0.5 is allowed."""
    ranks = ranks_of(folder)
    before = {name: np.eye(1, 30)[0] * 2.0 for name in NAMES}
    arrays = {f"unclipped {name}": value for name, value in before.items()}
    arrays |= {f"taken {name}": value * norm / 4 for name, value in before.items()}
    for rank in range(SIZE):
        for step in range(STEPS):
            write_arrays(folder / f"rank{rank}.step{step}.npz", arrays)
    clips = clips or [ClipRecord(1, 4, 4, 0.5)]
    return found([with_steps(rank, clips=list(clips), scale=scale) for rank in ranks], folder, "clipping")


@pytest.mark.parametrize(
    ("norm", "scale", "clips", "cause"),
    [
        (0.5, None, (), None),
        (0.51, None, (), message("clipped_by_another_norm")),
        (0.25, 2.0, (), message("clipped_while_scaled", scale=2.0)),
        (0.5, None, (ClipRecord(1, 2, 4, 0.5), ClipRecord(1, 2, 4, 0.5)), message("clipped_in_parts", parts=2)),
        (
            0.5,
            None,
            (ClipRecord(0, 4, 4, 0.5), ClipRecord(1, 4, 4, 0.5)),
            message("clipped_after_each_micro_batch", clips=2),
        ),
        (4.0, None, (ClipRecord(1, 4, 4, None),), None),  # by value
        (4.0, None, (ClipRecord(1, 2, 4, 0.5),), None),  # some of the parameters, on purpose
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


# Steps


def advancing(rank: ScriptRecord, by: int) -> ScriptRecord:
    return replace(rank, steps=[replace(step, schedules=[by * n]) for n, step in enumerate(rank.steps)])


@pytest.mark.parametrize(
    ("by", "libraries", "answer", "said"),
    [
        (0, [], "right", message("schedule_advances_once_a_step", advances=0, steps=4)),
        (1, [], "right", message("schedule_advances_once_a_step", advances=3, steps=4)),
        (2, [], "differs", message("schedule_advances_once_per_rank")),
        (2, ["accelerate"], "unknown", message("schedule_advances_once_per_process", advances=2)),
        (3, ["accelerate"], "differs", message("schedule_advances_several_times")),
    ],
)
def test_how_often_a_schedule_advances(
    by: int, libraries: list[str], answer: str, said: Message, tmp_path: Path
) -> None:
    ranks = [replace(advancing(rank, by), libraries=libraries) for rank in ranks_of(tmp_path)]
    finding = schedule(ranks)
    assert (finding.answer, finding.message) == (answer, said)


def test_small_updates_may_vanish_in_16_bits(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, "one stays")
    assert updates(ranks, Record(tmp_path)).answer == "differs"
    assert updates([with_steps(rank, dtypes=["bfloat16"]) for rank in ranks], Record(tmp_path)).answer == "unknown"


# The whole


@pytest.mark.parametrize("question", ["steps", "initial weights", "gradient", "loss weight", "weights"])
def test_without_an_answer_that_a_proof_needs_nothing_is_proven(question: Question, tmp_path: Path) -> None:
    results = judged(tmp_path, "mean")
    assert with_replay(results, []).answer == "right"
    without = [finding for finding in results.findings if finding.question != question]
    assert with_replay(replace(results, findings=without), []).answer == "unknown"
    unknown = replace(finding_of(results, question), answer="unknown")
    assert with_replay(replace(results, findings=[*without, unknown]), []).answer == "unknown"


def test_the_first_divergence_is_that_of_the_earliest_step() -> None:
    said = message("one_rank")

    def at(question: Question, step: int | None) -> Finding:
        return Finding(question, "differs", said, Divergence("script", step, question, None, None, None, None))

    several = [at("rows", 2), at("gradient", 1), at("rate", 1)]
    first = first_divergence(several)
    assert first and first.quantity == "gradient"
    first = first_divergence([*several, at("weights", None)])
    assert first and first.quantity == "weights"
    assert first_divergence([Finding("rows", "right", said)]) is None


def test_buffers_of_each_rank_are_noted_and_the_share_of_recording_is_told(tmp_path: Path) -> None:
    ranks = [
        replace(rank, buffers={"bn.running_mean": rank.rank}, notes=[message("loader_not_read")])
        for rank in ranks_of(tmp_path)
    ]
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), STEPS), ranks, Record(tmp_path))
    note = message("statistics_of_each_rank", buffer="bn.running_mean")
    assert results.notes == [message("loader_not_read"), note]
    assert results.record_share == pytest.approx(0.1 / (0.1 * STEPS))
