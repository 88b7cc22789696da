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
from samestep.errors import UserError
from samestep.rank import graceful_stop
from samestep.rank.checkpoints import Checkpoints, StopAfter
from samestep.rank.packed import pack, unpack
from samestep.records.checkpoint import Every
from samestep.world import World
from samestep.world.heartbeat import CHECKPOINT, FORWARD, Heartbeat, read


def test_ranks_agree_on_the_step_of_a_timed_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One rank may be a step ahead of the other; both find the same step due, and neither has passed it."""
    monkeypatch.setattr(graceful_stop, "POLL_S", 0.01)
    store, every = HashStore(), Every(1, "s")
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
    alone = Checkpoints(tmp_path, World(), None, every=Every(0, "s"))
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
        return pulse.phase if pulse else None

    wait_until(lambda: phase() == CHECKPOINT, "the phase is", phase)
    assert waiting.is_alive()
    os.close(slow)
    waiting.join(budget())
    assert (tmp_path / "checkpoints" / "step-4").exists()


@pytest.mark.parametrize(
    ("every", "due"),
    [(None, []), (Every(4, "steps"), [4, 8, 12]), (Every(1, "epochs"), [5, 10]), (Every(2, "epochs"), [10])],
)
def test_when_one_is_due(every: Every | None, due: list[int], tmp_path: Path) -> None:
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
    with pytest.raises(
        UserError, match=r"cannot hold scheduler/lr_lambdas/0: it is a (Posix)?Path; let it be a tensor"
    ):
        pack({"scheduler": {"lr_lambdas": [Path()]}})
