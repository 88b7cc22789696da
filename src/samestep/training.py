"""Run: the object that an engine trains with. It has four verbs: register, batches, loss, step; and closure, for LBFGS.

What it observes becomes the record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.data.loader import batches
from samestep.data.schedule import schedule_of
from samestep.errors import Refused, not_a_scalar
from samestep.job import Batch, Job, MicroBatch
from samestep.job.module_outputs import ModuleOutputs
from samestep.rank.checkpoint_state import Fragment, Saving
from samestep.rank.checkpoints import Checkpoints
from samestep.rank.evaluate import Evaluations, EvaluationSchedule, Evaluator
from samestep.rank.graceful_stop import NoStop, Stop
from samestep.rank.guards import ON_NAN, Guards, ReplicaGuard
from samestep.rank.listeners import Listeners, Progress, ProgressReport
from samestep.rank.meter import Meter
from samestep.rank.observer import Observer
from samestep.rank.parts import Part
from samestep.rank.shards import full_state_dict
from samestep.rank.spot_check import SpotChecks
from samestep.rank.step import (
    ForwardPass,
    StepCount,
    is_one_row_error,
    keep_state,
    loss_over_all_rows,
    one_row_message,
    with_weights,
)
from samestep.rank.step_costs import StepCosts
from samestep.rank.step_profile import StepProfile
from samestep.rank.threaded_group import active_turns
from samestep.rank.weights import Ema, StateDict
from samestep.records.training_record import TrainingRecord
from samestep.world import World
from samestep.world.heartbeat import BACKWARD, BUILDING, FORWARD, LOADING, heartbeat

FragmentsOf = Callable[[nn.Module, World], list[Fragment]]


class Run:
    """One training of `job` on this rank, `steps` optimizer steps long.

    observe: also record what only the proof needs (digests, learning rates, optimizer steps); never while measuring.
    progress: called at most twice a second with the number of steps done and a recent loss.
    stop: may end the training early. evaluator: evaluates between two epochs; its time counts for no step.
    listeners: are called after each step; None: none are. checkpoints: where the training continues, and keeps its
    state. guards: of losses, gradients and replicas; None: losses alone are looked at, late. spot_checks: of
    some steps, by a replay; None: of none. profile: of some steps. costs: of one step; None: of none.
    outputs: takes what modules return.
    played: as of Schedule. micro_batches: as of the engine's Layout.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        steps: int,
        *,
        observe: bool = False,
        progress: Progress | None = None,
        stop: Stop | None = None,
        evaluator: Evaluator | None = None,
        listeners: Listeners | None = None,
        checkpoints: Checkpoints | None = None,
        guards: Guards | None = None,
        spot_checks: SpotChecks | None = None,
        profile: StepProfile | None = None,
        costs: StepCosts | None = None,
        outputs: ModuleOutputs | None = None,
        played: tuple[int, ...] = (),
        micro_batches: int = 1,
    ) -> None:
        self.job, self.world, self.steps = job, world, steps
        self.schedule = replace(schedule_of(job, world.replicas), played=played, fewest=micro_batches)
        self.count = StepCount()
        self.meter = Meter(world.rank, world.device)
        self.began_at: float | None = None
        self.micro_batch: MicroBatch | None = None  # of the latest call of loss()
        self.fragments_of: FragmentsOf | None = None  # the engine's function, where it flattens parameters
        self.model: Any = None  # until register()
        self.optimizer: Any = None
        self.scaler: GradScaler | None = None
        self.ema: Ema | None = None
        self.left_out = False
        self.evaluation_schedule: EvaluationSchedule | None = None
        self._forward = ForwardPass(job, world)
        self.carried = self._forward.carried
        self.stateful: dict[str, Any] = {}
        self._stop, self._evaluator, self._listeners, self._outputs = stop or NoStop(), evaluator, listeners, outputs
        self._observer = Observer(world) if observe else None
        self._saving = Saving(job, world, checkpoints) if checkpoints else None
        wanted: list[Part | None] = [
            profile,
            costs,
            ON_NAN[guards.on_nan]() if guards else None,
            spot_checks,  # before the job's functions and an evaluation, which may change what a step has made
            listeners,
            Evaluations(evaluator, self._stop, listeners) if evaluator else None,
            ReplicaGuard(world, guards.replicas) if guards and guards.replicas else None,
            ProgressReport(progress) if progress else None,
            self._observer,
            self._saving,  # last: a checkpoint holds what an evaluation has changed
        ]
        self._parts = [part for part in wanted if part]
        for part in self._parts:
            part.training = self

    def register(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        state: Callable[[], StateDict] | None = None,
    ) -> None:
        """Registers the model and its optimizer. Call it once, when both are ready, before the first batch.

        Where the training continues from a checkpoint, it is loaded into all of these.
        model: the plain module, without the engine's wrapper.
        scheduler: the learning-rate scheduler that the loop steps. scaler: of the loss, in fp16.
        state: returns the full state dict; None: the module's own, with its shards gathered.
        """
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        if self._outputs:
            self._outputs.begin(model)
        if self._evaluator:
            self._evaluator.begin(state or (lambda: full_state_dict(model)))
        if self.job.scheduler and self.job.scheduler.every == "evaluation":
            self.evaluation_schedule = EvaluationSchedule(self.job.scheduler, optimizer)
        self.stateful = {
            "scheduler": scheduler,
            "evaluation_scheduler": self.evaluation_schedule.scheduler if self.evaluation_schedule else None,
            "scaler": scaler,
            "evaluations": self._evaluator,
        }
        if self._saving:
            position = self._saving.load(state)
            heartbeat.begin(BUILDING)
            self.count.continue_from(position.done, position.skipped)
            if position.last is not None:
                self._stop.after(position.last)
        for part in self._parts:
            part.begin()

    def batches(self) -> Iterator[Batch]:
        """Yields this rank's micro-batches on its device, in the schedule's order."""
        ahead = active_turns() is None
        loader = batches(self.job, self.world, self.schedule, self.steps, first=self.count.first, ahead=ahead)
        if self.job.batch_weight:
            loader = with_weights(loader, self.job, self.world)
        self.began_at = time.time()
        self.meter.begin()
        for part in self._parts:
            part.step_begins()
        step = self.count.done
        while True:
            heartbeat.begin(LOADING, step)
            start, cpu_start = time.perf_counter(), time.thread_time()
            batch = next(loader, None)
            if batch is None or batch.fetch_s is None:
                self.meter.waited(time.perf_counter() - start, None, time.thread_time() - cpu_start)
            else:
                self.meter.waited(time.perf_counter() - start, batch.fetch_s, batch.fetch_cpu_s)
            if batch and batch.micro_batch.micro == 0:
                for part in self._parts:
                    part.drawn(batch.micro_batch.step)
            if batch is None or (batch.micro_batch.micro == 0 and self._stop.ends_before(batch.micro_batch.step)):
                self.count.all_drawn = True
                self._finish()
                return
            self.count.drawn = batch.micro_batch.step + 1
            step = batch.micro_batch.step + batch.micro_batch.completes_step
            yield batch

    def _finish(self) -> None:
        """Leaves the model with its averaged weights after the last step, for the engine to return them. No phase is
        active any more.

        Called when there are no more batches, and after each step: libraries ask for the next batch before the step.
        """
        if not self.count.all_drawn or self.count.done < self.count.drawn:
            return
        if self.count.first < self.count.done < self.steps and self.count.ends is None:
            for part in self._parts:
                part.stopped()
        if self.count.done == self.count.first:
            self._begin_ema()
        self._forward.end()
        if self.ema:
            self.ema.swap()
            self.ema = None
        if self.model is not None and self.count.done:
            for part in self._parts:
                part.end()

    def begin_averages(self) -> None:
        """Begins the averages of the weights in the first step; for a loop whose parameters are gathered when it
        computes the loss."""
        if self.count.done == self.count.first:
            self._begin_ema()
            for part in self._parts:
                part.averages_begin()

    def _begin_ema(self) -> None:
        if self.job.ema and not self.ema and self.model:
            self.ema = Ema(self.model, self.job.ema)
            if self._saving:
                self._saving.load_ema(self.ema)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes the mean loss of the batch's phase over its rows, times its share. Returns a scalar.

        The share makes the average over the replicas exact where they have different numbers of rows. Before the
        forward pass each device's random generator is seeded for this (step, micro-batch, replica).
        With Job(gather_outputs=True) it is the loss over all ranks' rows, times the number of ranks. With
        Job(carry_state=True) the batch gets its rows' state here, since libraries ask for batches in advance.
        Raises Refused when BatchNorm gets one row, UserError when the criterion returns no scalar.
        """
        loss = self.mean_loss(model, batch)
        self.note_loss(batch, loss)
        # The ranks' gradients of the loss over all rows, averaged, are then their sum.
        share = float(self.world.replicas) if self._gathers else batch.micro_batch.share
        return loss if share == 1.0 else loss * share  # no multiplication in the graph where batches are even

    @property
    def _gathers(self) -> bool:
        return self.job.gather_outputs and self.world.replicas > 1

    def mean_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes the mean loss of the batch, as loss() does, without its share. For an engine whose rank computes it
        only in part, or not in the order of the micro-batches: it calls note_loss() for each of these later."""
        self.micro_batch = micro_batch = batch.micro_batch
        heartbeat.begin(FORWARD, micro_batch.step)
        self.begin_averages()  # here, when every library has made the parameters its own
        if self.count.done == self.count.first and self._saving and self.fragments_of and not micro_batch.micro:
            self._saving.begin_fragments(self.fragments_of(model, self.world))
        job = self._forward.begin(micro_batch, self.model)
        for part in self._parts:
            part.forward(micro_batch)
        plain = model if self.model is None else self.model  # what an engine's wrapper keeps is its own
        batch = self.carried.attach(batch) if self.carried else batch
        with ExitStack() as stack:
            if micro_batch.rows == 0:
                stack.callback(keep_state(plain))
            try:
                output = job.forward(model, batch)
            except ValueError as error:
                if is_one_row_error(error):
                    raise Refused(one_row_message(micro_batch.step, self.world.rank)) from error
                raise
            output = self.carried.store(output, batch) if self.carried else output
            if self._gathers:
                loss = loss_over_all_rows(job, output, batch, self.schedule, self.world)
            else:
                loss = job.criterion(output, batch)
            if loss.dim() != 0:
                raise not_a_scalar(list(loss.shape))
        heartbeat.begin(BACKWARD, micro_batch.step)
        return loss

    def note_loss(self, batch: Batch, loss: Tensor) -> None:
        """Takes in the mean loss of a batch, in the order of the micro-batches."""
        micro_batch = batch.micro_batch
        if self._forward.closure:
            self._forward.closure.add(batch, loss)
        if not (self._forward.closure and self._forward.closure.again):
            self.meter.loss(loss.detach(), micro_batch.step, micro_batch.weight)
            for part in self._parts:
                part.loss(batch, loss)

    def closure(self, backward: Callable[[Batch], Tensor]) -> tuple[Callable[[], Any], ...]:
        """Returns the arguments of the optimizer's step: one closure where it demands that, as LBFGS does; else none.

        backward: computes the gradients of one micro-batch as the loop does; with the step's last one it also
        synchronises and clips them.
        """
        return (self._forward.closure.of_step(self.model, backward),) if self._forward.closure and self.model else ()

    def step(self, loss: Tensor, *, skipped: bool = False) -> None:
        """Counts one optimizer step. Call it after each, with the loss of its last micro-batch.

        skipped: the weights were not updated, as a GradScaler does after an overflow.
        """
        self.meter.step()
        self.left_out = skipped
        for part in self._parts:
            part.stepped()
        self.count.skipped += self.left_out
        self.count.done += 1
        heartbeat.step(self.count.done)
        if self.ema and not self.left_out:
            self.ema.update()
        for part in self._parts:
            part.counted()
        self._finish()
        for part in self._parts:
            part.step_begins()

    def release(self) -> None:
        """Drops the model of a training that has failed, and what holds it, so that their memory is free."""
        self.model = self.optimizer = self.ema = self.evaluation_schedule = self._evaluator = self._saving = None
        self.stateful, self._parts = {}, []
        self._forward.end()

    def observations(self) -> TrainingRecord:
        """Returns what this rank observed of every micro-batch, step and optimizer step. Call it after the training."""
        step_s = self.meter.finish()
        if self._listeners:
            self._listeners.report(self.meter)
        observer = self._observer
        return TrainingRecord(
            losses=self.meter.losses,
            step_of=self.meter.step_of,
            weight_of=self.meter.weight_of,
            step_s=step_s,
            wait_s=self.meter.wait_s,
            busy_s=self.meter.busy_s,
            fetch_s=self.meter.fetch_s,
            fetch_cpu_s=self.meter.fetch_cpu_s,
            began_at=self.began_at,
            start_digests=observer.start_digests if observer else [],
            autocast=bool(observer and observer.autocast),
            micro_batches=observer.micro_batches if observer else [],
            later=observer.rows_of_later_epochs(self.schedule) if observer else {},
            rates=observer.rates if observer else [],
            skipped_steps=self.count.skipped,
            resumed_from=self.count.first,
            end_digests=observer.end_digests if observer else {},
            divided=observer.divided if observer else {},
            state=observer.state if observer else {},
        )
