"""The judge of a user's script, on records that are made up: it needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from samestep.judge import first_divergence, judge, with_replay
from samestep.message import Message, message
from samestep.records.files import read, write
from samestep.records.findings import CheckResults, Finding, Question
from samestep.records.record import Record
from samestep.records.results import Divergence
from samestep.records.script import GroupRecord, LossRecord, MicroBatchRecord, PassRecord, ScriptRecord, StepRecord
from samestep.records.script_plan import ScriptPlan
from samestep.records.tensor_files import write_arrays

NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]
SIZE, STEPS, ROWS = 2, 4, 24
Gradient = dict[str, np.ndarray]


def taken(kind: str, local: list[list[Gradient]], rank: int) -> Gradient:
    """What the optimizer of a rank takes. local: [rank][micro-batch]."""

    def total(parts: list[Gradient]) -> Gradient:
        return {name: sum(part[name] for part in parts) for name in NAMES}

    own = [total(parts) for parts in local]
    mean = {name: value / SIZE for name, value in total(own).items()}
    first = total([parts[0] for parts in local])
    match kind:
        case "summed":
            return {name: value * SIZE for name, value in mean.items()}
        case "averaged twice":
            return {name: value / SIZE for name, value in mean.items()}
        case "never reduced":
            return own[rank]
        case "never reduced, divided by hand":
            return {name: value / len(local[rank]) for name, value in own[rank].items()}
        case "too early, divided by hand":
            return {name: (first[name] / SIZE + total(local[rank][1:])[name]) / len(local[rank]) for name in NAMES}
        case "divided alone":
            return {name: value / SIZE for name, value in own[rank].items()}
        case "left out":
            return mean | {"b.bias": own[rank]["b.bias"]}
        case "too early":
            return {name: first[name] / SIZE + total(local[rank][1:])[name] for name in NAMES}
        case "lost":
            return {name: total([parts[-1] for parts in local])[name] / SIZE for name in NAMES}
        case "not finite":
            return mean | {"a.bias": mean["a.bias"] * np.nan}
        case "no known mistake":
            return {name: value + 0.1 for name, value in mean.items()}
    return mean


def judged(
    folder: Path, kind: str, micro_batches: int = 1, weight: float | None = None, **changed: object
) -> CheckResults:
    """Judges a record. weight: of each loss. changed: fields of rank 1's record."""
    random, weight = np.random.default_rng(0), weight or 1 / micro_batches
    steps: list[list[StepRecord]] = [[] for _ in range(SIZE)]
    before: list[Gradient] = [{} for _ in range(SIZE)]
    for step in range(STEPS):
        sizes = {name: 1e-12 if kind == "rounding" and name == "b.bias" else weight for name in NAMES}
        local = [
            [{name: size * random.normal(size=30) for name, size in sizes.items()} for _ in range(micro_batches)]
            for _ in range(SIZE)
        ]
        for rank in range(SIZE):
            gradient = taken(kind, local, rank)
            if kind == "not cleared":
                gradient = {name: value + before[rank].get(name, 0.0) for name, value in gradient.items()}
                before[rank] = gradient
            arrays = {f"taken {name}": value for name, value in gradient.items()}
            for number, part in enumerate(local[rank]):
                arrays |= {f"local {number} {name}": value for name, value in part.items()}
            write_arrays(folder / f"rank{rank}.step{step}.npz", arrays)
            losses = [LossRecord(weight, "mean", 3)]
            rows = [[f"{rank} {step} {number} {row}" for row in range(3)] for number in range(micro_batches)]
            batches = [MicroBatchRecord(of_batch, losses, [0]) for of_batch in rows]
            apart = kind.startswith("never reduced") or kind == "left out"
            digests = {name: step + rank * apart for name in NAMES}
            moved = NAMES[:3] if kind in ("rounding", "one stays") else NAMES
            steps[rank].append(StepRecord(0, batches, [0.1], [step], [], 0, None, digests, moved, ["float32"]))
    for rank in range(SIZE):
        own = list(range(rank, ROWS, SIZE))
        rows = PassRecord(0, ROWS, 3, [[i] for i in own[:6]], own[6:], [["x"]] * 6, 4, "DistributedSampler")
        start = {name: 1 for name in NAMES}
        record = ScriptRecord(rank, SIZE, start, steps[rank], [rows], "steps", [], 0.1, [0.1] * STEPS)
        write(folder / f"rank{rank}.json", record if rank == 0 else replace(record, **changed))
    ranks = [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(SIZE)]
    return judge(ScriptPlan(str(folder), 0.0, "train.py", (), STEPS), ranks, Record(folder))


def finding_of(results: CheckResults, question: Question) -> Finding:
    (finding,) = [finding for finding in results.findings if finding.question == question]
    return finding


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


def recorded(folder: Path) -> list[ScriptRecord]:
    return [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(SIZE)]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_mean_is_right(micro_batches: int, tmp_path: Path) -> None:
    results = judged(tmp_path, "mean", micro_batches)
    assert results.answer == "right" and results.first_divergence is None


@pytest.mark.parametrize(
    ("kind", "micro_batches", "weight", "cause"),
    [
        ("summed", 1, None, message("gradients_summed_over_ranks", ranks=2)),
        ("averaged twice", 1, None, message("gradients_divided_by_ranks_again", ranks=2)),
        ("never reduced", 1, None, message("ranks_never_reduce_gradients")),
        ("never reduced", 3, None, message("ranks_never_reduce_gradients")),
        ("never reduced, divided by hand", 3, 1.0, message("ranks_never_reduce_gradients")),
        ("too early, divided by hand", 3, 1.0, message("reduced_before_last_micro_batch", micro_batch=0, last=2)),
        ("divided alone", 1, None, message("gradients_divided_and_never_reduced", ranks=2)),
        ("left out", 1, None, message("parameters_left_out_of_reduction", left_out=1, parameters=4)),
        ("too early", 3, None, message("reduced_before_last_micro_batch", micro_batch=0, last=2)),
        ("lost", 3, None, message("gradients_removed_between_micro_batches", removed=2, micro_batches=3)),
        ("mean", 3, 1.0, message("loss_not_divided_by_accumulation", micro_batches=3)),
        # It is not a sum over the 2 ranks.
        ("mean", 2, 1.0, message("loss_not_divided_by_accumulation", micro_batches=2)),
        ("mean", 1, 0.5, message("loss_divided_by_ranks", ranks=2)),
        ("mean", 1, 2.0, message("loss_multiplied_by_ranks", ranks=2)),
    ],
)
def test_a_wrong_gradient_is_named(
    kind: str, micro_batches: int, weight: float | None, cause: Message, tmp_path: Path
) -> None:
    results = judged(tmp_path, kind, micro_batches, weight)
    assert results.answer == "differs"
    assert results.first_divergence and results.first_divergence.step == 0
    assert results.first_divergence.cause == cause


def test_a_gradient_that_all_ranks_change_alike_is_for_the_replay_to_judge(tmp_path: Path) -> None:
    found = finding_of(judged(tmp_path, "no known mistake"), "gradient")
    assert (found.answer, found.message) == ("unknown", message("gradients_changed_alike", step=0))


def test_a_gradient_that_is_not_finite_is_not_passed(tmp_path: Path) -> None:
    """NaN is no greater than any bound."""
    results = judged(tmp_path, "not finite")
    found = finding_of(results, "gradient")
    assert found.answer == results.answer == "unknown"
    assert found.message == message("gradient_of_rank_not_finite", parameter="a.bias", rank=0, step=0)


def test_gradients_that_are_never_cleared_are_named(tmp_path: Path) -> None:
    first = judged(tmp_path, "not cleared").first_divergence
    assert first and first.step == 1 and first.cause == message("gradients_never_cleared")


def test_a_parameter_that_stays_is_named_unless_its_gradient_is_rounding(tmp_path: Path) -> None:
    """As that of a bias before BatchNorm is."""
    first = judged(tmp_path, "one stays").first_divergence
    assert first and first.tensor == "b.bias"
    assert first.cause == message("optimizer_of_a_copy", with_gradient=1)
    assert judged(tmp_path, "rounding").answer == "right"


def test_ranks_with_other_parameters_are_not_compared(tmp_path: Path) -> None:
    """They are the stages of a pipeline; nothing is passed, and nothing is said to differ."""
    results = judged(tmp_path, "mean", start={"c.weight": 1})
    assert results.answer == "unknown"
    assert finding_of(results, "initial weights").message.id == "ranks_hold_other_parameters"


def test_a_sum_of_losses_that_are_divided_by_the_ranks_is_right(tmp_path: Path) -> None:
    assert judged(tmp_path, "summed", weight=0.5).answer == "right"


def test_a_loss_of_another_weight_is_not_passed_as_right(tmp_path: Path) -> None:
    """It may be intended: the replay in one process tells."""
    results = judged(tmp_path, "mean", weight=0.7)
    assert finding_of(results, "loss weight").answer == results.answer == "unknown"
    replayed = Finding("replayed gradient", "right", message("one_rank"))
    assert with_replay(results, [replayed]).answer == "right"


@pytest.mark.parametrize(
    ("changed", "question"),
    [
        ({"start": {name: 2 for name in NAMES}}, "initial weights"),
        ({"steps": []}, "steps"),
        ({"passes": [PassRecord(0, ROWS, 3, [[0]], list(range(1, ROWS)), [["x"]], 4, "RandomSampler")]}, "rows"),
    ],
)
def test_a_rank_of_its_own_is_named(changed: dict[str, object], question: str, tmp_path: Path) -> None:
    results = judged(tmp_path, "mean", **changed)
    assert results.answer == "differs"
    assert next(finding.question for finding in results.findings if finding.answer == "differs") == question


def test_one_rank_is_judged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SIZE", 1)
    assert judged(tmp_path, "mean", 3).answer == "right"
    found = judged(tmp_path, "mean", 3, 1.0).first_divergence
    assert found and found.cause == message("loss_not_divided_by_accumulation", micro_batches=3)


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


@pytest.mark.parametrize(
    ("calls", "reduces"),
    [
        ([], True),  # what the ranks tell each other is not known
        (["all_reduce [1000, 1000] float"], True),
        (["reduce_scatter [1000000] float"], True),
        (["all_reduce [1] float", "broadcast [1000, 1000] float"], False),  # ZeRO's optimizer without DDP
        (["all_reduce [1] float"] * STEPS, False),
        (["all_gather [3] float", "all_gather [3] long"] * STEPS, True),  # the greatest elements alone
        (["all_reduce [10, 1] float", "all_reduce [3, 1] float"] * STEPS, True),  # factors of a low rank
    ],
)
def test_gradients_that_the_optimizer_reduces_are_right(calls: list[str], reduces: bool, tmp_path: Path) -> None:
    """Each rank steps from its own gradient, and the weights of all ranks stay the same (nanochat's DistMuonAdamW)."""
    judged(tmp_path, "never reduced")
    ranks = [read(ScriptRecord, tmp_path / f"rank{rank}.json") for rank in range(SIZE)]
    ranks = [replace(rank, groups={"0": GroupRecord([*range(SIZE)], calls)} if calls else {}) for rank in ranks]
    alike = [
        replace(
            rank, steps=[replace(step, weights=dict.fromkeys(NAMES, number)) for number, step in enumerate(rank.steps)]
        )
        for rank in ranks
    ]
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), STEPS), alike, Record(tmp_path))
    if not reduces:
        assert finding_of(results, "gradient").message.id == "ranks_never_reduce_gradients"
        return
    assert finding_of(results, "gradient").message == message("gradients_are_reduced_by_the_optimizer", steps=STEPS)
    # Their scale is seen by the replay alone.
    assert (finding_of(results, "loss weight").answer, results.answer) == ("unknown", "unknown")


@pytest.mark.parametrize(
    ("factors", "answer", "said"),
    [
        ([[0.5, 0.5], [1.0, 1.0], [0.2, 0.2], [0.7, 0.7]], "right", "gradients_are_the_mean_clipped_by_own_code"),
        ([[0.5, 0.6], [1.0, 1.0], [0.2, 0.2], [0.7, 0.7]], "differs", "gradient_of_no_known_mistake"),
        ([[0.5, 0.5], [3.0, 3.0], [0.2, 0.2], [0.7, 0.7]], "unknown", "gradients_changed_alike"),
        ([[0.5, 0.5], [3.0, 3.1], [0.2, 0.2], [0.7, 0.7]], "differs", "gradient_of_no_known_mistake"),
    ],
    ids=["alike", "by rank", "grown alike", "grown by rank"],
)
def test_a_gradient_that_own_code_clips_by_parameter(
    factors: list[list[float]], answer: str, said: str, tmp_path: Path
) -> None:
    judged(tmp_path, "mean")
    for rank in range(SIZE):
        for step in range(STEPS):
            arrays = dict(Record(tmp_path).arrays(f"step{step}", rank))
            for name, by_rank in zip(NAMES, factors):
                arrays[f"taken {name}"] = arrays[f"taken {name}"] * by_rank[rank]
            write_arrays(tmp_path / f"rank{rank}.step{step}.npz", arrays)
    ranks = [read(ScriptRecord, tmp_path / f"rank{rank}.json") for rank in range(SIZE)]
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), STEPS), ranks, Record(tmp_path))
    finding = finding_of(results, "gradient")
    assert (finding.answer, finding.message.id) == (answer, said)


def test_gradients_that_own_code_clips_and_nothing_reduces_are_named(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    for rank in range(SIZE):
        for step in range(STEPS):
            arrays = dict(Record(tmp_path).arrays(f"step{step}", rank))
            for number, name in enumerate(NAMES):
                parts = [key for key in arrays if key.startswith("local") and key.endswith(f" {name}")]
                own = sum(arrays[key] for key in parts)
                arrays[f"taken {name}"] = own * (0.3 + 0.1 * rank + 0.1 * number)
            write_arrays(tmp_path / f"rank{rank}.step{step}.npz", arrays)
    ranks = [read(ScriptRecord, tmp_path / f"rank{rank}.json") for rank in range(SIZE)]
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), STEPS), ranks, Record(tmp_path))
    assert finding_of(results, "gradient").message == message("ranks_never_reduce_gradients")


def test_gradients_that_are_never_cleared_and_divided_by_a_scaler_are_not_clipped_by_own_code(tmp_path: Path) -> None:
    """A scaler divides what is left of the step before a second time, so that little of it is added."""
    scale = 2.0**15
    judged(tmp_path, "mean")
    for rank in range(SIZE):
        first = dict(Record(tmp_path).arrays("step0", rank))
        left: dict[str, np.ndarray] = {}
        for step in range(STEPS):
            arrays = {name: array * (-1) ** step for name, array in first.items()}
            for name in NAMES[:1]:
                arrays[f"taken {name}"] = arrays[f"taken {name}"] + left.get(name, 0.0)
                left[name] = arrays[f"taken {name}"] / scale
            write_arrays(tmp_path / f"rank{rank}.step{step}.npz", arrays)
    ranks = [read(ScriptRecord, tmp_path / f"rank{rank}.json") for rank in range(SIZE)]
    ranks = [replace(rank, steps=[replace(step, scale=scale) for step in rank.steps]) for rank in ranks]
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), STEPS), ranks, Record(tmp_path))
    assert finding_of(results, "gradient").message == message("gradients_never_cleared")


@pytest.mark.parametrize(("scale", "answer"), [(None, "differs"), (65536.0, "unknown")])
def test_a_gradient_that_is_nan_on_one_rank_is_named(scale: float | None, answer: str, tmp_path: Path) -> None:
    judged(tmp_path, "not finite")
    arrays = dict(Record(tmp_path).arrays("step0", 1))
    write_arrays(tmp_path / "rank1.step0.npz", arrays | {"local 0 a.bias": arrays["local 0 a.bias"] * np.nan})
    ranks = [read(ScriptRecord, tmp_path / f"rank{rank}.json") for rank in range(SIZE)]
    scaled = [replace(rank, steps=[replace(step, scale=scale) for step in rank.steps]) for rank in ranks]
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), STEPS), scaled, Record(tmp_path))
    finding = finding_of(results, "gradient")
    assert finding.answer == answer
    if answer == "differs":
        assert finding.message == message("gradient_not_finite_on_some_ranks", ranks=[1], step=0)


def test_a_mean_of_gradients_that_each_rank_clipped_by_own_code_is_named(tmp_path: Path) -> None:
    judged(tmp_path, "mean")
    arrays = [dict(Record(tmp_path).arrays("step0", rank)) for rank in range(SIZE)]
    for rank in range(SIZE):
        for name in NAMES:
            own = [0.3, 0.8]
            arrays[rank][f"taken {name}"] = sum(own[r] * arrays[r][f"local 0 {name}"] for r in range(SIZE)) / SIZE
    for rank in range(SIZE):
        write_arrays(tmp_path / f"rank{rank}.step0.npz", arrays[rank])
    ranks = [read(ScriptRecord, tmp_path / f"rank{rank}.json") for rank in range(SIZE)]
    results = judge(ScriptPlan(str(tmp_path), 0.0, "train.py", (), STEPS), ranks, Record(tmp_path))
    assert finding_of(results, "gradient").message.id == "clipped_before_reduction"
