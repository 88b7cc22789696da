"""Run: what an engine is handed. Four verbs: begin, batches, loss, step. Its observations become the record."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from samestep.data.loader import batches
from samestep.data.schedule import key, schedule_of
from samestep.errors import Refused, not_a_scalar
from samestep.job import Batch, Job, Part
from samestep.rank.graceful_stop import GracefulStop
from samestep.rank.meter import Meter
from samestep.records.record import Observations, PartSeen
from samestep.world import World

LATER = (2, 3, 97)  # epochs that the proof's steps do not reach: their order is a promise, noted untrained

Progress = Callable[[int, float], None]  # (steps done, a recent loss)


class Evaluator(Protocol):
    """What evaluates a training between its epochs."""

    def begin(self, state: Callable[[], dict[str, Any]]) -> None: ...

    def is_due(self, done: int, steps_per_epoch: int) -> bool: ...

    def look(self, done: int) -> bool: ...


class Run:
    """One training of `job` on this rank, `steps` optimizer steps long.

    observe: also note what only the proof needs (digests, learning rates, optimizer steps); never while measuring.
    progress: called at most twice a second with the steps done and a loss. stop: what may end it early.
    evaluator: evaluates it between two epochs, outside of the steps' time.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        steps: int,
        *,
        observe: bool = False,
        progress: Progress | None = None,
        stop: GracefulStop | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        self.job, self.world, self.steps = job, world, steps
        self.schedule = schedule_of(job, world.size)
        self.meter = Meter(world.rank, world.device)
        self.began_at: float | None = None
        self.part: Part | None = None  # the latest whose loss was asked for
        self._observe = observe
        self._parts: list[PartSeen] = []
        self._start_digest: str | None = None
        self._autocast = False
        self._rates: list[list[float]] = []
        self._depth, self._stepping = 0, set[int]()
        self._progress = progress
        self._stop, self._evaluator = stop, evaluator
        self._told_at = time.monotonic()
        self._done = self._skipped = 0
        self._streams = [_stream(device) for device in world.devices]

    def begin(
        self, model: nn.Module, optimizer: Optimizer, *, state: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        """Call once, when model and optimizer are ready, before the first batch. model: the plain module.

        state: gives its whole state dict, where that is not the module's own with its shards gathered.
        """
        if self._evaluator:
            self._evaluator.begin(state or (lambda: whole(model)))
        if self._observe:
            self._start_digest = digest_state(model)
            # After the step: before it, libraries that accumulate show stale gradients and the next step's rate.
            optimizer.register_step_pre_hook(lambda *_: self._entered())
            optimizer.register_step_post_hook(lambda o, *_: self._stepped(o))

    def _entered(self) -> None:
        self._depth += 1

    def _stepped(self, optimizer: Optimizer) -> None:
        """Notes the rates of one optimizer step. Horovod's step calls another one inside; DeepSpeed takes a step for
        each parameter group, the others empty: calls on groups that have not stepped yet belong to the same step."""
        self._depth -= 1
        if self._depth:
            return
        full = [group for group in optimizer.param_groups if group["params"]]
        groups = {id(group) for group in full}
        if self._stepping & groups or not self._rates:
            self._rates.append([])
            self._stepping = set()
        self._stepping |= groups
        self._rates[-1] += [float(group["lr"]) for group in full]

    def batches(self) -> Iterator[Batch]:
        """This rank's rows on its device, in schedule order, one micro-batch after the other."""
        ahead = batches(self.job, self.world, self.schedule, self.steps)
        self.began_at = time.time()
        self.meter.begin()
        while True:
            asked, worked = time.perf_counter(), time.thread_time()
            batch = next(ahead, None)
            if batch is None or batch.fetch_s is None:
                self.meter.waited(time.perf_counter() - asked, None, time.thread_time() - worked)
            else:
                self.meter.waited(time.perf_counter() - asked, batch.fetch_s, batch.fetch_cpu_s)
            if batch is None or (self._stop and batch.part.micro == 0 and self._stop.ends_before(batch.part.step)):
                return
            yield batch

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch's rows times its share, so that the ranks' average is exact when uneven.

        Seeds the random stream of this (step, micro-batch, replica) first: one for each device, each its own.
        Raises Refused when BatchNorm gets one row.
        """
        self.part = part = batch.part
        first = self.world.rank * len(self._streams)
        for replica, stream in enumerate(self._streams, first):
            stream.manual_seed(key(self.job.seed, "replica", part.step, part.micro, replica))
        kept = [(b, b.clone()) for b in model.buffers()] if part.rows == 0 else []
        if self._observe:
            self._autocast |= torch.is_autocast_enabled(self.world.device.partition(":")[0])
        try:
            output = self.job.forward(model, batch)
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                raise Refused(one_row_sentence(part.step, self.world.rank)) from error
            raise
        loss = self.job.criterion(output, batch)
        if loss.dim() != 0:
            raise not_a_scalar(list(loss.shape))
        for buffer, value in kept:  # a rank without rows leaves no trace; .data, because autograd may hold the buffer
            buffer.data.copy_(value)
        self.meter.loss(loss.detach(), part.step, part.weight)
        if self._observe:
            self._note(batch)
        return loss if part.share == 1.0 else loss * part.share  # one node less in the graph of even batches

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        """Call after each optimizer step, with its last loss. skipped: the optimizer left its weights as they were,
        as a GradScaler does after an overflow."""
        self.meter.step()
        self._skipped += skipped
        self._done += 1
        if self._evaluator and self._evaluator.is_due(self._done, self.schedule.steps_per_epoch):
            ends = self._evaluator.look(self._done)
            self.meter.resume()
            if ends and self._stop:
                self._stop.after(self._done)
        if self._progress and time.monotonic() - self._told_at > 0.5:
            self._told_at = time.monotonic()
            self._progress(self._done, self.meter.losses[-1] if self.meter.losses else float("nan"))

    def observations(self) -> Observations:
        """What this rank saw of every micro-batch, every step and every optimizer step."""
        step_s = self.meter.finish()
        return Observations(
            losses=self.meter.losses,
            step_of=self.meter.step_of,
            weight_of=self.meter.weight_of,
            step_s=step_s,
            wait_s=self.meter.wait_s,
            fetch_s=self.meter.fetch_s,
            fetch_cpu_s=self.meter.fetch_cpu_s,
            began_at=self.began_at,
            start_digest=self._start_digest,
            autocast=self._autocast,
            parts=self._parts,
            later=self._later() if self._observe else {},
            rates=self._rates,
            skipped_steps=self._skipped,
        )

    def _later(self) -> dict[int, list[int]]:
        """Epoch -> this rank's rows of its first step."""
        rows = replace(self.schedule, weight=None)  # rows that all weigh 0 must not end a proof that stops before them
        parts = {epoch: rows.step(self.world.rank, epoch, 0) for epoch in LATER}
        return {epoch: [i for p in of for i in p.indices[: p.rows].tolist()] for epoch, of in parts.items()}

    def _note(self, batch: Batch) -> None:
        part = batch.part
        rows, digests = part.indices[: part.rows].tolist(), digest_rows(batch.data, part.rows)
        self._parts.append(PartSeen(part.epoch, part.step, part.micro, rows, part.weight, digests))


def one_row_sentence(step: int, rank: int) -> str:
    """What a user reads when a BatchNorm layer would get a single row."""
    return (
        f"step {step}: rank {rank} gets 1 row, BatchNorm needs 2; "
        "set global_batch=… so that every rank gets more, or last=drop"
    )


def digest_rows(data: Any, rows: int) -> list[str]:
    """A digest of each of the first `rows` rows of a batch, from the bytes of the tensors that arrived.

    A tensor whose first dimension is not the rows counts whole in each of them, and so does what is no tensor.
    """
    hashes = [hashlib.blake2b(digest_size=6) for _ in range(rows)]
    for leaf in tree_leaves(data):
        tensor = leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else None
        if tensor is not None and tensor.dim() and len(tensor) == rows:
            pieces = [_bytes(row) for row in tensor]
        else:
            pieces = [repr(leaf).encode() if tensor is None else _bytes(tensor)] * rows
        for piece, state in zip(pieces, hashes):
            state.update(piece)
    return [state.hexdigest() for state in hashes]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def whole(model: nn.Module) -> dict[str, Any]:
    """A module's state dict, FSDP's shards gathered on every rank."""
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}


def digest_state(model: nn.Module) -> str:
    """A digest of a module's parameters and buffers, in their order."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in (value for value in whole(model).values() if isinstance(value, Tensor)):
        state.update(_bytes(tensor.detach().cpu().contiguous()))
    return state.hexdigest()


def _stream(device: str) -> torch.Generator:
    """The random stream that dropout on `device` draws from.

    Not torch.manual_seed: it also queues a seed for CUDA with a stack trace, 70 µs a call where this takes one.
    """
    if device == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.device(device).index or 0]
