"""A training that is interrupted and continued is the training that was not: by the same engine to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ranks import Ranks
from samestep.records.checkpoint import Every
from samestep.records.plan import Plan, Train
from samestep.records.record import Observations

JOBS = f"{Path(__file__).parent}/jobs_resumed.py"
ELSEWHERE = {"gan": "jobs_phases.py:gan", "lstm": "jobs_carried.py:lstm"}
Pool = Callable[[int], Ranks]


def train(ranks: Ranks, job: str, engine: str, out: Path, **options: object) -> list[Observations]:
    """Trains on `ranks`, and keeps the weights and the checkpoints in `out`. Returns what each rank observed."""
    out.mkdir(exist_ok=True)
    name, _, optimizer = job.partition(" ")
    at = f"{Path(__file__).parent}/{ELSEWHERE[name]}" if name in ELSEWHERE else f"{JOBS}:{name}"
    training = Train(weights=str(out / "weights.safetensors"), **options)  # type: ignore[arg-type]
    settings = {"optimizer": optimizer} if optimizer else {}
    return ranks.work(Plan("", 0.0, at, settings, engine, trainings=(training,))).training("train")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "weights.safetensors")


def distance(out: Path, other: Path) -> float:
    """The largest difference of two trainings' weights."""
    mine, theirs = weights(out), weights(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine)


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp", "zero"])
@pytest.mark.parametrize("job", ["alike adam", "stateful sgd", "gan", "lstm"])
def test_a_continued_training_is_the_training_to_the_bit(job: str, engine: str, ranks: Pool, tmp_path: Path) -> None:
    """Interrupted in an epoch, at its end, and where a phase has had its turn alone."""
    here, twice = ranks(1 if engine == "single" else 2), {"every_steps": 2, "every": 1}
    (whole, *_) = train(here, job, engine, tmp_path / "whole", **twice)
    assert whole.asked_steps
    stops = {1, 3, whole.asked_steps // 2, whole.asked_steps - 1}
    for stop in sorted(stops):
        (first, *_) = train(here, job, engine, tmp_path / "cut", stop_after=stop, **twice)
        assert first.resumed_from == max([0, *(s for s in stops if s < stop)])
    (rest, *_) = train(here, job, engine, tmp_path / "cut", **twice)
    assert rest.resumed_from == max(stops)
    assert distance(tmp_path / "whole", tmp_path / "cut") == 0.0
    assert rest.curve == whole.curve
    assert rest.losses == whole.losses[-len(rest.losses) :]


RELAY = [("single", 1), ("ddp", 2), ("fsdp", 3), ("zero", 2), ("fsdp", 2), ("ddp", 3), ("zero", 3), ("single", 1)]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_other_engines_and_other_numbers_of_ranks_continue(optimizer: str, ranks: Pool, tmp_path: Path) -> None:
    """A relay: each trains one step, and the last one all that is left."""
    job = f"alike {optimizer}"
    whole = train(ranks(1), job, "single", tmp_path / "whole")[0]
    for stop, (engine, size) in enumerate(RELAY, 1):
        last = {"stop_after": stop} if stop < len(RELAY) else {}
        seen = train(ranks(size), job, engine, tmp_path / "relay", **last)[0]
        assert seen.resumed_from == stop - 1
    assert distance(tmp_path / "whole", tmp_path / "relay") < 1e-12
    for mine, theirs in zip(seen.curve, whole.curve, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)


def test_checkpoints_are_due_and_the_newest_stay(ranks: Pool, tmp_path: Path) -> None:
    every = Every(2, "steps")
    train(ranks(2), "alike", "ddp", tmp_path / "out", checkpoint_every=every, keep=3)
    found = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert found == ["step-10", "step-12", "step-8"]
    seen = train(ranks(2), "alike", "ddp", tmp_path / "out", resume=str(tmp_path / "out/checkpoints/step-8"))
    assert seen[0].resumed_from == 8
