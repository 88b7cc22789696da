"""Run, which the training loop calls for its batches and losses, and which counts and saves its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from samestep.data.schedule import key, schedule_of
from samestep.job import Batch, Job
from samestep.rank.step import CarriedState, Closure, default_generator, keep_state, loss_over_all_rows
from samestep.rank.weights import Ema
from samestep.tasks.eject.runtime.job import special_parts
from samestep.tasks.eject.runtime.rows import loaded
from samestep.tasks.eject.runtime.world import World


class Run:
    """One training of `job` on this rank, with all but phases and rates that evaluations move.

    checkpoint: the file that it is saved to, and continues from; '': none. micro_batches: the fewest of a step.
    """

    schedule: Any  # samestep's own functions take it, and the world, for samestep's
    world: Any

    def __init__(self, job: Job, world: World, checkpoint: str = "", micro_batches: int = 1) -> None:
        self.job, self.world = job, world
        self.schedule = replace(schedule_of(job, world.replicas), fewest=micro_batches)
        self.steps, self.done = job.steps(self.schedule.steps_per_epoch), 0
        # A checkpoint holds no averages and no carried state.
        self.checkpoint = "" if special_parts(job) else checkpoint
        self.carried = CarriedState() if job.carry_state else None
        self.recomputed = Closure(self.world) if job.optimizer.needs_closure else None
        self.ema: Ema | None = None

    def register(self, model: nn.Module, optimizer: Optimizer, **others: Any) -> None:
        """Takes what a checkpoint holds; continues from the checkpoint where there is one."""
        self.model, self.optimizer = model, optimizer
        self.is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self.saved = others if self.is_sharded else {"model": model, "optimizer": optimizer, **others}
        if not os.path.exists(self.checkpoint):
            return
        state = torch.load(self.checkpoint, map_location=self.world.device, weights_only=True)
        self.done = state["steps"]
        if self.world.rank == 0:
            print(f"continues from step {self.done} of {self.steps}, in {self.checkpoint}", flush=True)
        for name in self.saved.keys() & state.keys():
            self.saved[name].load_state_dict(state[name])
        if self.is_sharded:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=StateDictOptions(full_state_dict=True),
            )

    def batches(self) -> Iterator[Batch]:
        """Yields this rank's micro-batches of the steps that are left."""
        micro_batches = self.schedule.micro_batches_of(self.world.replica, self.steps, self.done)
        return loaded(self.job, micro_batches, self.world.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean loss over the batch's rows, times their share: averaged over the ranks it is the step's."""
        loss = self.mean_loss(model, batch)
        self.note_loss(batch, loss)
        # The ranks' gradients of the loss over all rows, averaged, are then their sum.
        share = float(self.world.size) if self.gathers else batch.micro_batch.share
        return loss if share == 1.0 else loss * share

    @property
    def gathers(self) -> bool:
        """Whether the criterion sees the outputs of all ranks."""
        return self.job.gather_outputs and self.world.size > 1

    def mean_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean loss over the batch's rows; for a pipeline, whose stages compute a part of it."""
        self.begin_averages()  # here, when the engine has made the parameters its own
        micro_batch, devices = batch.micro_batch, self.world.devices
        # Each replica has its own dropout, which draws what it draws in this step, also in a training that continues.
        for replica, device in enumerate(devices, self.world.replica * len(devices)):
            seed = key(self.job.seed, "replica", micro_batch.step, micro_batch.micro, replica)
            default_generator(device).manual_seed(seed)
        restore = keep_state(self.model) if micro_batch.rows == 0 else None
        batch = self.carried.attach(batch) if self.carried else batch
        try:
            output = self.job.forward(model, batch)
            output = self.carried.store(output, batch) if self.carried else output
            if self.gathers:
                return loss_over_all_rows(self.job, output, batch, self.schedule, self.world)
            return self.job.criterion(output, batch)
        finally:  # also where a stage of a pipeline ends
            if restore:
                restore()

    def note_loss(self, batch: Batch, loss: Tensor) -> None:
        """Takes in the mean loss of a batch, in the order of the micro-batches."""
        self.latest = loss.detach()
        if self.recomputed:
            self.recomputed.add(batch, loss)

    def closure(self, backward: Callable[[Batch], Tensor]) -> tuple[Callable[[], Any], ...]:
        """Returns the arguments of the optimizer's step: a function that computes the loss again, where LBFGS asks."""
        return (self.recomputed.of_step(self.model, backward),) if self.recomputed else ()

    def begin_averages(self) -> None:
        """Begins the averages of the weights, where the job has some."""
        if self.job.ema and self.ema is None:
            self.ema = Ema(self.model, self.job.ema)

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        """Called after each optimizer step. skipped: after an overflow, a GradScaler left the weights as they were."""
        self.done += 1
        if self.world.rank == 0 and (self.done % 10 == 0 or self.done == self.steps):
            print(f"step {self.done} of {self.steps}: loss {self.latest.item():.6g}", flush=True)
        if self.ema and not skipped:
            self.ema.update()
        if self.ema and self.done == self.steps:
            self.ema.swap()  # the averages are evaluated and saved
        if self.checkpoint and self.done % self.schedule.steps_per_epoch == 0:
            self.save()

    def save(self) -> None:
        """Saves all that a training needs to continue, on rank 0."""
        if hasattr(self.optimizer, "consolidate_state_dict"):
            self.optimizer.consolidate_state_dict(0)  # its state is sharded over the ranks
        if self.is_sharded:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        if self.world.rank == 0:
            state = {name: part.state_dict() for name, part in self.saved.items() if part is not None}
            if self.is_sharded:
                state |= {"model": model, "optimizer": optimizer}
            torch.save({**state, "steps": self.done}, f"{self.checkpoint}.new")
            os.replace(f"{self.checkpoint}.new", self.checkpoint)  # never half a file, whenever it is killed
