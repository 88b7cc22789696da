"""Run, which the training loop calls for its batches and losses, and which counts and saves its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from samestep.data.schedule import key, schedule_of
from samestep.job import Batch, Job
from samestep.tasks.eject.runtime.loaded_rows import loaded
from samestep.tasks.eject.runtime.plain_schedule import FEWEST, Schedule
from samestep.tasks.eject.runtime.world import World

PLAIN_SCHEDULE = False  # an epoch's order is a permutation of the rows
PLAIN_STEP = False  # a step is a forward, a backward and an update
ONE_DEVICE = False  # each process has one device
SAVES = True  # the training can be saved and continued
SHARDED = False  # the model and the optimizer's state are sharded over the ranks
CONSOLIDATES = False  # the optimizer's state is gathered before it is saved
SHARING = 1  # so many ranks divide a model and have the same rows


class Run:
    """One training of `job` on this rank. checkpoint: the file that it is saved to, and continues from."""

    def __init__(self, job: Job, world: World, checkpoint: str = "") -> None:
        self.job, self.world, self.checkpoint = job, world, checkpoint
        self.replica, replicas = world.rank // SHARING, world.size // SHARING
        self.schedule: Any = Schedule(job, replicas) if PLAIN_SCHEDULE else schedule_of(job, replicas)
        if FEWEST > 1 and not PLAIN_SCHEDULE:
            self.schedule = replace(schedule_of(job, replicas), fewest=FEWEST)
        self.steps, self.done = job.max_steps or job.epochs * self.schedule.steps_per_epoch, 0

    def register(self, model: nn.Module, optimizer: Optimizer, **others: Any) -> None:
        """Takes what a checkpoint holds; continues from the checkpoint where there is one."""
        if SAVES:
            if SHARDED:
                self.model, self.optimizer, self.saved = model, optimizer, others
            else:
                self.saved = {"model": model, "optimizer": optimizer, **others}
            if os.path.exists(self.checkpoint):
                state = torch.load(self.checkpoint, map_location=self.world.device, weights_only=True)
                self.done = state["steps"]
                for name in self.saved.keys() & state.keys():
                    self.saved[name].load_state_dict(state[name])
                if SHARDED:
                    set_state_dict(
                        model,
                        optimizer,
                        model_state_dict=state["model"],
                        optim_state_dict=state["optimizer"],
                        options=StateDictOptions(full_state_dict=True),
                    )

    def batches(self) -> Iterator[Batch]:
        """Yields this rank's micro-batches of the steps that are left."""
        return loaded(self.job, self.schedule.micro_batches_of(self.replica, self.steps, self.done), self.world.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean loss over the batch's rows, times their share: averaged over the ranks it is the step's."""
        micro_batch = batch.micro_batch
        if ONE_DEVICE:
            # Dropout draws what it draws in this step, also in a training that is continued.
            torch.manual_seed(key(self.job.seed, "replica", micro_batch.step, micro_batch.micro, self.replica))
        else:
            devices = self.world.devices
            for replica, device in enumerate(devices, self.world.rank * len(devices)):  # each replica its own dropout
                random_stream(device).manual_seed(
                    key(self.job.seed, "replica", micro_batch.step, micro_batch.micro, replica)
                )
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if micro_batch.rows == 0 else []
        if PLAIN_STEP:
            loss, share = self.job.criterion(self.job.forward(model, batch), batch), micro_batch.share
        else:
            loss, share = self.loss_and_share(model, batch)
        for buffer, value in buffers:  # a rank without rows leaves no trace in BatchNorm's statistics
            buffer.data.copy_(value)
        self.latest = loss.detach()
        return loss if share == 1.0 else loss * share

    def begin_averages(self) -> None:
        """Begins the averages of the weights, where the job has some."""

    def mean_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean loss over the batch's rows; for a pipeline, whose stages compute a part of it."""
        micro_batch = batch.micro_batch
        torch.manual_seed(key(self.job.seed, "replica", micro_batch.step, micro_batch.micro, self.replica))
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if micro_batch.rows == 0 else []
        try:
            return self.job.criterion(self.job.forward(model, batch), batch)
        finally:  # also where a stage ends
            for buffer, value in buffers:
                buffer.data.copy_(value)

    def note_loss(self, batch: Batch, loss: Tensor) -> None:
        """Takes in the mean loss of a batch, in the order of the micro-batches."""
        self.latest = loss

    def loss_and_share(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Returns the loss over the batch's rows, and the factor with which the ranks' average is the step's."""
        return self.job.criterion(self.job.forward(model, batch), batch), batch.micro_batch.share

    def closure(self, backward: Callable[[Batch], Tensor]) -> tuple[Callable[[], Any], ...]:
        """Returns the arguments of the optimizer's step: none. LBFGS would be given a function."""
        return ()

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        """Called after each optimizer step. skipped: after an overflow, a GradScaler left the weights as they were."""
        self.done += 1
        if self.world.rank == 0 and (self.done % 10 == 0 or self.done == self.steps):
            print(f"step {self.done} of {self.steps}: loss {self.latest.item():.6g}", flush=True)
        if SAVES and self.done % self.schedule.steps_per_epoch == 0:
            self.save()

    def save(self) -> None:
        if CONSOLIDATES:
            self.saved["optimizer"].consolidate_state_dict(0)
        if SHARDED:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        if self.world.rank == 0:
            state = {name: part.state_dict() for name, part in self.saved.items() if part is not None}
            if SHARDED:
                state |= {"model": model, "optimizer": optimizer}
            torch.save({**state, "steps": self.done}, f"{self.checkpoint}.new")
            os.replace(f"{self.checkpoint}.new", self.checkpoint)  # never half a file, whenever it is killed


def random_stream(device: str) -> Generator:
    """Returns the random stream that dropout on `device` draws from."""
    if device == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.device(device).index or 0]
