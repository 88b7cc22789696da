"""A training that is interrupted and continued is the training that was not: by the same engine to the bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conformance import jobs_resumed
from lane_marks import in_turn
from mutations.plant import patched
from planting import FileFault
from ranks import Ranks, RanksFailed
from said import refuses, says
from samestep.errors import UserError
from samestep.message import message
from samestep.rank.checkpoints import Checkpoints
from samestep.records.checkpoint import Interval, Manifest
from samestep.records.files import read, write
from samestep.records.inspection import Values
from samestep.records.launch_request import LaunchRequest
from samestep.records.plan import Plan, RunTask
from samestep.records.training_record import TrainingRecord
from samestep.training import Run
from samestep.world import World

JOBS = f"{Path(__file__).parent}/jobs_resumed.py"
ELSEWHERE = {"gan": "jobs_phases.py:gan", "lstm": "jobs_carried.py:lstm"}
Pool = Callable[[int], Ranks]


def train(
    ranks: Ranks, job: str, engine: str, out: Path, *, settings: Values | None = None, **options: object
) -> list[TrainingRecord]:
    """Trains on `ranks`, and keeps the weights and the checkpoints in `out`. Returns what each rank observed."""
    out.mkdir(exist_ok=True)
    name, _, optimizer = job.partition(" ")
    at = f"{Path(__file__).parent}/{ELSEWHERE[name]}" if name in ELSEWHERE else f"{JOBS}:{name}"
    training = RunTask(weights=str(out / "weights.safetensors"), **options)  # type: ignore[arg-type]
    of_job = {"optimizer": optimizer} if optimizer else {}
    return ranks.work(Plan("", 0.0, at, of_job, engine, settings or {}, trainings=(training,))).training("run")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "weights.safetensors")


def distance(out: Path, other: Path) -> float:
    """The largest difference of two trainings' weights."""
    mine, theirs = weights(out), weights(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine)


FAST = {("alike adam", "fsdp"), ("gan", "zero")}
CASES = [
    pytest.param(job, engine, marks=() if (job, engine) in FAST else in_turn(4, row, column))
    for row, job in enumerate(("alike adam", "stateful sgd", "gan", "lstm"))
    for column, engine in enumerate(("single", "ddp", "fsdp", "zero"))
] + [pytest.param("lbfgs", "single"), pytest.param("lbfgs", "ddp", marks=pytest.mark.check)]


@pytest.mark.parametrize(("job", "engine"), CASES)
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


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.check)])
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
    every = Interval(2, "steps")
    train(ranks(2), "alike", "ddp", tmp_path / "out", checkpoint_every=every, keep=3)
    found = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert found == ["step-10", "step-12", "step-8"]
    seen = train(ranks(2), "alike", "ddp", tmp_path / "out", resume=str(tmp_path / "out/checkpoints/step-8"))
    assert seen[0].resumed_from == 8


def flipped(checkpoint: Path) -> None:
    file = checkpoint / "rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def truncated(checkpoint: Path) -> None:
    file = checkpoint / "rank1.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def newer(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema": ', '"schema": 9'))


DAMAGES = {
    "a flipped bit": flipped,
    "a truncated file": truncated,
    "a newer schema": newer,
    "a missing file": lambda checkpoint: (checkpoint / "rank1.json").unlink(),
    "an incomplete manifest": lambda checkpoint: (checkpoint / "manifest.json").write_text("{"),
    "another number in the manifest": lambda checkpoint: write(
        checkpoint / "manifest.json", replace(read(Manifest, checkpoint / "manifest.json"), world_size=3)
    ),
    "no manifest": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
}


def test_a_damaged_checkpoint_is_passed_over(ranks: Pool, tmp_path: Path) -> None:
    """One after the other, the newest is damaged: the one before it is taken each time, and at last none."""
    here, out = ranks(2), tmp_path / "out"
    train(here, "alike", "ddp", out, checkpoint_every=Interval(1, "steps"), keep=len(DAMAGES))
    for newest, damage in zip(range(12, 0, -1), DAMAGES.values()):
        damage(out / "checkpoints" / f"step-{newest}")
        before = newest - 1 if newest > 13 - len(DAMAGES) else 0
        saved = Checkpoints(out / "checkpoints", World(), None).load()
        assert (saved.manifest.step if saved else 0) == before


def test_another_jobs_checkpoint_is_refused_unless_it_is_named(ranks: Pool, tmp_path: Path) -> None:
    train(ranks(1), "alike", "single", tmp_path / "out", stop_after=2)
    folder = tmp_path / "out" / "checkpoints"
    (manifest,) = folder.glob("*/manifest.json")
    mine, other = (LaunchRequest("job.py", "", f"lr={lr}", "ddp", "", "", "", "") for lr in (1, 2))
    write(manifest, replace(read(Manifest, manifest), asked=mine).sealed())
    assert Checkpoints(folder, World(), None, request=replace(mine, engine="fsdp")).load()
    difference = message("value_differs", what="--set", there="lr=1", here="lr=2")
    with refuses("checkpoint_of_another_training", difference=difference):
        Checkpoints(folder, World(), None, request=other).load()
    assert Checkpoints(folder, World(), None, request=other, resume=str(folder)).load()


def test_a_model_of_another_shape_is_refused(ranks: Pool, tmp_path: Path) -> None:
    train(ranks(1), "alike", "single", tmp_path / "out", stop_after=2)
    job = jobs_resumed.stateful()
    checkpoints = Checkpoints(tmp_path / "out" / "checkpoints", World(), None)
    run, model = Run(job, World(), 12, checkpoints=checkpoints), job.model()
    with pytest.raises(UserError) as refused:
        run.register(model, job.optimizer.build(model))
    says(refused.value.message, "checkpoint_of_another_model")
    assert refused.value.message.fields["tensors"][:3] == ["centre", "first.bias", "first.weight"]


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(ranks: Pool, tmp_path: Path) -> None:
    """A file is where the folder should be: nothing can be written there."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "checkpoints").write_text("")
    seen = train(ranks(2), "alike", "ddp", tmp_path / "whole", checkpoint_every=Interval(2, "steps"))[0]
    assert len(seen.step_s) == 12


def test_lines_of_a_log_after_the_checkpoint_go(ranks: Pool, tmp_path: Path) -> None:
    for name, more in (("whole", {}), ("cut", {"checkpoint_every": Interval(5, "steps"), "stop_after": 7})):
        train(ranks(2), "alike", "ddp", tmp_path / name, log=("csv",), **more)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-7")
    assert train(ranks(2), "alike", "ddp", tmp_path / "cut", log=("csv",))[0].resumed_from == 5
    for name, columns in (("steps.csv", 4), ("evaluations.csv", 3)):
        whole, cut = (
            [line.split(",")[:columns] for line in (tmp_path / run / name).read_text().splitlines()]
            for run in ("whole", "cut")
        )
        assert cut == whole


TWICE = "        self._state.others['scheduler'].step()\n"
FAULTS = [
    ("momentum left out", "rank/checkpoint_state.py", "if state is not None and", "if state is None and"),
    ("a step twice", "training.py", "self.steps, first=self.count.first", "self.steps, first=self.count.first - 1"),
    (
        "a step left out",
        "training.py",
        "self.steps, first=self.count.first",
        "self.steps, first=self.count.first + (self.count.first > 0)",
    ),
    (
        "the order of epoch 0 again",
        "data/schedule.py",
        "*self.place_of(step))",
        "(0 if first else self.place_of(step)[0]), self.place_of(step)[1])",
    ),
    (
        "the rate moved twice",
        "rank/checkpoint_state.py",
        "        self._saved, self._taken =",
        TWICE + "        self._saved, self._taken =",
    ),
    ("the rate as at first", "rank/checkpoint_state.py", "            load_numbers(group", "            str(group"),
    (
        "averages begun anew",
        "rank/checkpoint_state.py",
        "            self._state.load_ema(self._saved, ema)\n",
        "            pass\n",
    ),
    ("rank 0's buffers for all", "rank/checkpoint_state.py", 'str(self.world.replica) if as_many else "0"', '"0"'),
    ("evaluations forgotten", "rank/evaluate.py", 'state["curve"], state["best_at"]', "[], -1"),
    (
        "the plateau forgotten",
        "rank/checkpoint_state.py",
        '            if name != "scaler" or',
        '            if "evaluation_" not in name and',
    ),
    (
        "pieces in the wrong place",
        "rank/checkpoint_files.py",
        "Place(piece.shape, piece.offset,",
        "Place(piece.shape, (0,) * len(piece.offset),",
    ),
]


@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [
        pytest.param(*fault, marks=in_turn(4, number) if number else (), id=fault[0])
        for number, fault in enumerate(FAULTS)
    ],
)
def test_a_planted_fault_is_caught(name: str, file: str, old: str, new: str, ranks: Pool, tmp_path: Path) -> None:
    """Two jobs under fsdp are interrupted in an epoch after the first: one of them ends elsewhere, or fails."""
    source, jobs = patched(FileFault(name, file, old, new), tmp_path / "source"), ("alike", "stateful")
    for job in jobs:
        train(ranks(2), job, "fsdp", tmp_path / f"whole {job}")
    same = []
    try:
        with Ranks(2, source) as own:
            for job in jobs:
                train(own, job, "fsdp", tmp_path / job, stop_after=5)
                seen = train(own, job, "fsdp", tmp_path / job)[0]
                same += [distance(tmp_path / f"whole {job}", tmp_path / job) == 0.0, len(seen.curve) == 4]
    except RanksFailed:
        return
    assert not all(same)
