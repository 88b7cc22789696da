"""WholeRun, in the place of Run: also for averaged weights, carried state, gathered outputs and optimizers like LBFGS.

A script has it where its job uses one of these, or where samestep could not build the job to see. It saves no
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.job import Batch, Job
from samestep.rank.step import CarriedState, Closure, loss_over_all_rows
from samestep.rank.weights import Ema
from samestep.tasks.eject.runtime.plain_run import Run


class WholeRun(Run):
    """One training of `job` on this rank, with all but phases and rates that evaluations move."""

    world: Any  # a World, which Closure and loss_over_all_rows take for samestep's own
    schedule: Any

    def __init__(self, job: Job, world: Any, checkpoint: str = "") -> None:
        super().__init__(job, world, checkpoint)
        self.ema: Ema | None = None
        self.carried = CarriedState() if job.carry_state else None
        self.recomputed = Closure(world) if job.optimizer.needs_closure else None

    def register(self, model: nn.Module, optimizer: Optimizer, **others: Any) -> None:
        self.model = model

    def begin_averages(self) -> None:
        if self.job.ema and self.ema is None:
            self.ema = Ema(self.model, self.job.ema)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.begin_averages()  # here, when the engine has made the parameters its own
        return super().loss(model, batch)

    def loss_and_share(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        batch = self.carried.attach(batch) if self.carried else batch
        output = self.job.forward(model, batch)
        output = self.carried.store(output, batch) if self.carried else output
        if self.job.gather_outputs and self.world.size > 1:
            loss = loss_over_all_rows(self.job, output, batch, self.schedule, self.world)
            share = float(self.world.size)  # the ranks' gradients, averaged, are then their sum
        else:
            loss, share = self.job.criterion(output, batch), batch.micro_batch.share
        if self.recomputed:
            self.recomputed.add(batch, loss)
        return loss, share

    def closure(self, backward: Callable[[Batch], Tensor]) -> tuple[Callable[[], Any], ...]:
        """Returns the arguments of the optimizer's step: a function that computes the loss again, where LBFGS asks."""
        return (self.recomputed.of_step(self.model, backward),) if self.recomputed else ()

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        super().step(loss, skipped=skipped)
        if self.ema and not skipped:
            self.ema.update()
        if self.ema and self.done == self.steps:
            self.ema.swap()  # the averages are evaluated and saved
