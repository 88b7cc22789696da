"""When checkpoints are due, and the tree of values and tensors that they are."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from budget import budget, wait_until
from launch.clock import Clock
from said import refuses
from samestep.rank import checkpoints, graceful_stop
from samestep.rank.checkpoint_files import Saved, pack, unpack
from samestep.rank.checkpoint_state import TrainingState
from samestep.rank.checkpoints import Checkpoints, StopAfter
from samestep.rank.observer import Observer
from samestep.rank.weights import Ema
from samestep.records.checkpoint import Interval
from samestep.world import World
from samestep.world.heartbeat import CHECKPOINT, FORWARD, Heartbeat, read


def test_a_file_of_another_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, clock = tmp_path / "late", Clock()
    monkeypatch.setattr(checkpoints, "time", clock)
    assert not checkpoints.is_visible_soon(file)
    assert clock.now == pytest.approx(100.0 + checkpoints.VISIBLE_S, abs=2 * checkpoints.POLL_S)

    class Appears(Clock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now > 101.0:
                file.touch()

    monkeypatch.setattr(checkpoints, "time", clock := Appears())
    assert checkpoints.is_visible_soon(file) and clock.now < 101.0 + 2 * checkpoints.POLL_S


def test_ranks_agree_on_the_step_of_a_timed_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One rank may be a step ahead of the other; both find the same step due, and neither has passed it."""
    monkeypatch.setattr(graceful_stop, "POLL_S", 0.01)
    store, every = HashStore(), Interval(1, "s")
    worlds = [World(rank=rank, size=2, local_size=2, local_rank=rank) for rank in range(2)]
    zero, one = (Checkpoints(tmp_path, world, store, every=every) for world in worlds)
    due: list[tuple[int, int]] = []
    until, step = time.monotonic() + budget(10), 0
    while len(due) < 2 and time.monotonic() < until:
        one.before(step + 1)  # ahead
        zero.before(step)
        due += [(0, step + 1)] if zero.is_due(step + 1, 10) else []
        due += [(1, step + 2)] if one.is_due(step + 2, 10) else []
        step += 1
        time.sleep(0.01)
    assert sorted(rank for rank, _ in due) == [0, 1]
    assert due[0][1] == due[1][1]
    assert step * 0.01 < budget(10)
    for each in (zero, one):
        each.close()


def test_a_timed_checkpoint_of_one_process(tmp_path: Path) -> None:
    alone = Checkpoints(tmp_path, World(), None, every=Interval(0, "s"))
    alone.before(5)
    assert [alone.is_due(done, 10) for done in (5, 6, 7)] == [False, True, False]


def test_waiting_for_the_disk_is_a_phase_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A slow disk must not be taken for a step that hangs. The disk: a pipe that gives no end before it is told to."""
    own = Heartbeat()
    own.open(tmp_path / "heartbeat")
    own.begin(FORWARD)
    monkeypatch.setattr("samestep.rank.checkpoints.heartbeat", own)
    os.mkfifo(tmp_path / "best")
    slow = os.open(tmp_path / "best", os.O_RDWR)
    checkpoints = Checkpoints(tmp_path / "checkpoints", World(), None)
    checkpoints.take(4, {}, [tmp_path / "best"])
    waiting = threading.Thread(target=checkpoints.close)
    waiting.start()

    def phase() -> int | None:
        pulse = read(tmp_path / "heartbeat")
        return pulse.activity if pulse else None

    wait_until(lambda: phase() == CHECKPOINT, "the phase is", phase)
    assert waiting.is_alive()
    os.close(slow)
    waiting.join(budget())
    assert (tmp_path / "checkpoints" / "step-4").exists()


@pytest.mark.parametrize(
    ("every", "due"),
    [(None, []), (Interval(4, "steps"), [4, 8, 12]), (Interval(1, "epochs"), [5, 10]), (Interval(2, "epochs"), [10])],
)
def test_when_one_is_due(every: Interval | None, due: list[int], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, World(), None, every=every)
    assert [done for done in range(1, 14) if checkpoints.is_due(done, 5)] == due


def test_a_training_is_stopped_after_so_many_steps() -> None:
    stop = StopAfter(3)
    assert [stop.ends_before(step) for step in range(5)] == [False, False, False, True, True]


def test_a_tree_comes_back_from_json() -> None:
    tree: dict[str, Any] = {
        "numbers": [1, 0.1, True, None, "text"],
        "tuple": (1, (2.5, [3])),
        "by number": {3: "c", 4: {"d": 1}},
        "milestones": Counter({5: 1}),
        "$tensor": "a name as ours",
        "infinite": [math.inf, -math.inf],
        "tensor": {"a": torch.arange(6.0).view(2, 3), "b": (torch.tensor(3),)},
    }
    packed, pieces = pack(tree)
    back = unpack(json.loads(json.dumps(packed, allow_nan=False)), lambda key: pieces[key].block)
    for tensor, other in ((tree["tensor"]["a"], back["tensor"]["a"]), (tree["tensor"]["b"][0], back["tensor"]["b"][0])):
        assert torch.equal(tensor, other)
        assert tensor.data_ptr() != other.data_ptr()
    del tree["tensor"], back["tensor"]
    assert back == tree
    assert type(back["milestones"]) is Counter
    assert math.isnan(unpack(pack({"x": math.nan})[0])["x"])


def test_what_a_checkpoint_cannot_hold_is_named() -> None:
    with refuses("checkpoint_cannot_hold", what="scheduler/lr_lambdas/0"):
        pack({"scheduler": {"lr_lambdas": [Path()]}})


def _stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model in float64, and Adam after one step."""
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3).double()).sum().backward()
    optimizer.step()
    return model, optimizer


def test_the_state_of_flat_float32_copies_goes_on_in_float64(tmp_path: Path) -> None:
    """As DeepSpeed's into any other engine: Adam fails on a state in another dtype than the parameter's."""
    model, optimizer = _stepped()
    tree = TrainingState(World(), model, optimizer, {}).tree(None) | {"flat": True}
    saved_state = {name: dict(state) for name, state in tree["optimizer"].items()}
    for state in saved_state.values():
        state.update({key: state[key].float().flatten() for key in ("exp_avg", "exp_avg_sq")})
    checkpoints = Checkpoints(tmp_path, World(), None)
    checkpoints.take(1, tree | {"optimizer": saved_state}, [])
    checkpoints.close()

    other, continued = _stepped()
    TrainingState(World(), other, continued, {}).load(Saved(tmp_path / "step-1"), in_epoch=False)
    for name, parameter in other.named_parameters():
        state = continued.state[parameter]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float64
        assert torch.equal(state["exp_avg"].float().flatten(), saved_state[name]["exp_avg"])
    continued.step()


def test_buffers_are_seen_as_they_were_before_the_first_forward_pass() -> None:
    """Under Lightning the rest of the state is seen inside DDP's, which has given rank 0's buffers to all ranks."""
    model = torch.nn.BatchNorm1d(3)
    observer = Observer(World())
    observer.watch(model, torch.optim.SGD(model.parameters()))
    observer.note_state(None, {})
    loaded = observer.state["buffer running_mean"]
    observer.note_buffers()
    assert model.running_mean is not None
    model.running_mean.fill_(5.0)
    observer.note_state(None, {})
    assert observer.state["buffer running_mean"] == loaded
    observer.note_state(None, {})
    assert observer.state["buffer running_mean"] != loaded


def test_a_later_damaged_checkpoint_does_not_cost_those_that_are_written(tmp_path: Path) -> None:
    """A training that began again before it must find what it wrote since: with --keep 1, that is all there is."""
    (tmp_path / "step-9").mkdir()
    checkpoints = Checkpoints(tmp_path, World(), None, keep=1)
    for done in (1, 2):
        checkpoints.take(done, {"position": done}, [])
        checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-9"]
    found = Checkpoints(tmp_path, World(), None).load()
    assert found is not None
    assert found.manifest.step == 2


def test_the_checkpoint_of_another_optimizer_is_one_sentence(tmp_path: Path) -> None:
    """Such as a named one, after the job's file was edited: Adam would fail on SGD's state, or SGD train without it."""
    model, optimizer = _stepped()
    checkpoints = Checkpoints(tmp_path, World(), None)
    checkpoints.take(1, TrainingState(World(), model, optimizer, {}, recipe=["AdamW"]).tree(None), [])
    checkpoints.close()
    saved, other = Saved(tmp_path / "step-1"), torch.optim.SGD(model.parameters(), momentum=0.9)
    with refuses("checkpoint_of_another_optimizer", saved=["AdamW"], optimizers=["SGD"]):
        TrainingState(World(), model, other, {}, recipe=["SGD"]).load(saved, in_epoch=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with refuses("checkpoint_lacks", what="scheduler"):
        TrainingState(World(), model, optimizer, {"scheduler": scheduler}).load(saved, in_epoch=False)
    with refuses("checkpoint_lacks", what="ema"):
        TrainingState(World(), model, optimizer, {}).load_ema(saved, Ema(model, 0.9))
