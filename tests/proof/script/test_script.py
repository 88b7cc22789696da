"""The judge of a user's script, on records that are made up: it needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from samestep.proof.script import judge, with_replay
from samestep.records.arrays import write_arrays
from samestep.records.files import read, write
from samestep.records.record import Record
from samestep.records.script import (
    CheckResults,
    Finding,
    LossSeen,
    MicroSeen,
    PassSeen,
    ScriptPlan,
    ScriptRecord,
    StepSeen,
)

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


def judged(folder: Path, kind: str, micro: int = 1, weight: float | None = None, **changed: object) -> CheckResults:
    """Judges a record. weight: of each loss. changed: fields of rank 1's record."""
    random, weight = np.random.default_rng(0), weight or 1 / micro
    steps: list[list[StepSeen]] = [[] for _ in range(SIZE)]
    before: list[Gradient] = [{} for _ in range(SIZE)]
    for step in range(STEPS):
        sizes = {name: 1e-12 if kind == "rounding" and name == "b.bias" else weight for name in NAMES}
        local = [
            [{name: size * random.normal(size=30) for name, size in sizes.items()} for _ in range(micro)]
            for _ in range(SIZE)
        ]
        for rank in range(SIZE):
            mine = taken(kind, local, rank)
            if kind == "not cleared":
                mine = before[rank] = {name: value + before[rank].get(name, 0.0) for name, value in mine.items()}
            arrays = {f"taken {name}": value for name, value in mine.items()}
            for number, part in enumerate(local[rank]):
                arrays |= {f"local {number} {name}": value for name, value in part.items()}
            write_arrays(folder / f"rank{rank}.step{step}.npz", arrays)
            losses = [LossSeen(weight, "mean", 3)]
            micros = [MicroSeen([f"{rank} {step} {n} {i}" for i in range(3)], losses, [0]) for n in range(micro)]
            digests = {name: step for name in NAMES}
            moved = NAMES[:3] if kind in ("rounding", "one stays") else NAMES
            steps[rank].append(StepSeen(0, micros, [0.1], [step], [], 0, None, digests, moved, ["float32"]))
    for rank in range(SIZE):
        own = list(range(rank, ROWS, SIZE))
        rows = PassSeen(0, ROWS, 3, [[i] for i in own[:6]], own[6:], [["x"]] * 6, 4, "DistributedSampler")
        start = {name: 1 for name in NAMES}
        record = ScriptRecord(rank, SIZE, start, steps[rank], [rows], "steps", [], 0.1, [0.1] * STEPS)
        write(folder / f"rank{rank}.json", record if rank == 0 else ScriptRecord(**{**vars(record), **changed}))
    ranks = [read(ScriptRecord, folder / f"rank{rank}.json") for rank in range(SIZE)]
    return judge(ScriptPlan(str(folder), 0.0, "train.py", (), STEPS), ranks, Record(folder))


@pytest.mark.parametrize("micro", [1, 3])
def test_a_mean_is_right(micro: int, tmp_path: Path) -> None:
    results = judged(tmp_path, "mean", micro)
    assert results.answer == "right" and results.first_divergence is None


@pytest.mark.parametrize(
    ("kind", "micro", "weight", "cause"),
    [
        ("summed", 1, None, "added up over the 2 ranks"),
        ("averaged twice", 1, None, "averaged twice"),
        ("never reduced", 1, None, "never reduced"),
        ("never reduced", 3, None, "never reduced"),
        ("never reduced, divided by hand", 3, 1.0, "never reduced: each rank"),
        ("too early, divided by hand", 3, 1.0, "before the last micro-batch"),
        ("divided alone", 1, None, "divided by the 2 ranks, and never reduced"),
        ("left out", 1, None, "1 parameter of 4 left out"),
        ("too early", 3, None, "before the last micro-batch"),
        ("lost", 3, None, "2 of 3 micro-batches were removed"),
        ("no known mistake", 1, None, "no known mistake explains it"),
        ("mean", 3, 1.0, "3 accumulated micro-batches are not divided"),
        ("mean", 2, 1.0, "2 accumulated micro-batches are not divided"),  # not a sum over the 2 ranks
        ("mean", 1, 0.5, "the loss is divided by the 2 ranks"),
        ("mean", 1, 2.0, "the loss is multiplied by the 2 ranks"),
    ],
)
def test_a_wrong_gradient_is_named(kind: str, micro: int, weight: float | None, cause: str, tmp_path: Path) -> None:
    results = judged(tmp_path, kind, micro, weight)
    assert results.answer == "differs"
    assert results.first_divergence and results.first_divergence.step == 0
    assert cause in results.first_divergence.cause


def test_a_gradient_that_is_not_finite_is_not_passed(tmp_path: Path) -> None:
    """NaN is no greater than any bound."""
    results = judged(tmp_path, "not finite")
    (found,) = [each for each in results.findings if each.question == "gradient"]
    assert found.answer == results.answer == "unknown"
    assert "a.bias on rank 0 holds NaN or an infinity at step 0" in found.sentence


def test_gradients_that_are_never_cleared_are_named(tmp_path: Path) -> None:
    first = judged(tmp_path, "not cleared").first_divergence
    assert first and first.step == 1 and "never cleared" in first.cause


def test_a_parameter_that_stays_is_named_unless_its_gradient_is_rounding(tmp_path: Path) -> None:
    """As that of a bias before BatchNorm is."""
    first = judged(tmp_path, "one stays").first_divergence
    assert first and first.tensor == "b.bias" and "no step moves them" in first.cause
    assert judged(tmp_path, "rounding").answer == "right"


def test_ranks_with_other_parameters_are_not_compared(tmp_path: Path) -> None:
    """They are the stages of a pipeline; nothing is passed, and nothing is said to differ."""
    results = judged(tmp_path, "mean", start={"c.weight": 1})
    assert results.answer == "unknown"
    (found,) = [each for each in results.findings if each.question == "initial weights"]
    assert "each rank holds other parameters" in found.sentence


def test_a_sum_of_losses_that_are_divided_by_the_ranks_is_right(tmp_path: Path) -> None:
    assert judged(tmp_path, "summed", weight=0.5).answer == "right"


def test_a_loss_of_another_weight_is_not_passed_as_right(tmp_path: Path) -> None:
    """It may be intended: the replay in one process tells."""
    results = judged(tmp_path, "mean", weight=0.7)
    (found,) = [each for each in results.findings if each.question == "loss weight"]
    assert found.answer == results.answer == "unknown"
    replayed = Finding("replayed gradient", "right", "")
    assert with_replay(results, [replayed]).answer == "right"


@pytest.mark.parametrize(
    ("changed", "question"),
    [
        ({"start": {name: 2 for name in NAMES}}, "initial weights"),
        ({"steps": []}, "steps"),
        ({"passes": [PassSeen(0, ROWS, 3, [[0]], list(range(1, ROWS)), [["x"]], 4, "RandomSampler")]}, "rows"),
    ],
)
def test_a_rank_of_its_own_is_named(changed: dict[str, object], question: str, tmp_path: Path) -> None:
    results = judged(tmp_path, "mean", **changed)
    assert results.answer == "differs"
    assert next(each.question for each in results.findings if each.answer == "differs") == question


def test_one_rank_is_judged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SIZE", 1)
    assert judged(tmp_path, "mean", 3).answer == "right"
    found = judged(tmp_path, "mean", 3, 1.0).first_divergence
    assert found and "3 accumulated micro-batches are not divided" in found.cause
