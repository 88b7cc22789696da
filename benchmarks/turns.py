"""Turns: training loops that share one process, a block of steps each.

A loop runs in a thread of its own and tells its `Turn` of the end of each step; after a block of steps the turn
hands over and waits. Only one loop runs at a time, in the same order on every rank, so that collectives meet. A
block's first step is never timed, for any loop: it finds the caches full of another one's tensors, and a rank that
came early waits in it. Stamps are taken as a step ends, the hand-over comes after the last one: it is in nobody's time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from samestep import Job
from samestep.world import World

WARM_UP = 2  # blocks: DDP rebuilds its buckets, allocators and threads settle
ModelState = dict[str, Tensor]


class Turn:
    """The turns of one training loop: its thread, its step times, and what it takes to check its training.

    train: (job, world, turn) -> the weights that it ends with. It calls `turn.model()` for its network and
    `turn.step_ended(loss)` after each of its `turn.steps` steps.
    """

    def __init__(self, name: str, train: Train, job: Job, world: World, rounds: int, block: int) -> None:
        self.name, self.train, self.job, self.world, self.block = name, train, job, world, block
        self.steps = (WARM_UP + rounds) * block
        self.rows = job.global_batch // world.size  # of a step on this rank
        self.seen: list[int] = []  # rows of each warm-up step
        self.losses: list[float] = []  # of the first and the last step of each block
        self.blocks: list[NDArray[np.float64]] = []  # seconds of each step but the first: [steps, (wall, CPU)]
        self.state: ModelState = {}
        self._stamps: list[tuple[float, float]] = []
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        threading.Thread(target=self._train, name=name, daemon=True).start()

    def take(self) -> None:
        """Lets the arm run one block, or to its end after its last one."""
        self._go.release()
        self._paused.acquire()
        if self._error:
            raise self._error

    def model(self) -> nn.Module:
        """The arm's own copy of the network, which counts the rows that it is given until the warm-up is over."""
        model = self.job.model()
        self._counter = model.register_forward_pre_hook(lambda _, inputs: self.seen.append(len(inputs[0])))
        return model

    def warm(self) -> None:
        """Ends the warm-up: what is timed has no hook."""
        self._counter.remove()
        self.blocks.clear()

    def step_ended(self, loss: Tensor) -> bool:
        """Every loop calls this at the end of each step. Returns True after its last step."""
        if not self._stamps or len(self._stamps) == self.block - 1:  # where the timed interval begins and ends
            self.losses.append(float(loss.detach()))
            if self.world.device != "cpu":
                torch.cuda.synchronize()
        self._stamps.append((time.perf_counter(), time.thread_time()))
        if len(self._stamps) < self.block:
            return False
        self.blocks.append(np.diff(self._stamps, axis=0))
        self._stamps.clear()
        self._paused.release()
        self._go.acquire()
        return self.finished

    @property
    def finished(self) -> bool:
        return len(self.losses) == 2 * self.steps // self.block

    def _train(self) -> None:
        self._go.acquire()
        torch.set_num_threads(1)  # a setting of each thread
        try:
            self.state = self.train(self.job, self.world, self)
            assert self.finished, f"{self.name} ended after {len(self.losses) / 2} blocks"
        except BaseException as error:
            self._error = error
        self._paused.release()


Train = Callable[[Job, World, Turn], ModelState]


def check(turn: Turn) -> None:
    """Raises AssertionError unless the arm has trained: rows, loss, weights, and the same weights on every rank."""
    assert turn.seen == [turn.rows] * WARM_UP * turn.block, f"{turn.name} saw {set(turn.seen)} rows, not {turn.rows}"
    assert turn.losses[-1] < turn.losses[0], f"{turn.name}'s loss rose: {turn.losses[0]} to {turn.losses[-1]}"
    start = dict(turn.job.model().named_parameters())
    for name, value in start.items():
        end = turn.state[name].detach().to(turn.world.device)
        assert not torch.equal(end.cpu(), value), f"{turn.name} left {name} where it was"
        of_ranks = [torch.empty_like(end) for _ in range(turn.world.size)]
        dist.all_gather(of_ranks, end)
        assert all(torch.equal(end, other) for other in of_ranks), f"{turn.name}'s ranks differ in {name}"
