"""Job: a training job, independent of engine, rank and device. The only code that a user writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from samestep.errors import UserError, nearest
from samestep.job.batch import Batch as Batch
from samestep.job.batch import MicroBatch as MicroBatch
from samestep.job.batch import StepInfo as StepInfo
from samestep.job.batch import apply_to_inputs as apply_to_inputs
from samestep.job.batch import counts_by_itself as counts_by_itself
from samestep.job.batch import output_and_state as output_and_state
from samestep.job.batch import reads_batch as reads_batch
from samestep.job.checks import (
    CALLED,
    check_calls,
    check_carried,
    check_dataset,
    check_functions,
    check_metrics,
    check_optimizer,
    check_workers,
    nested,
    refuse_unknown,
    shown,
)
from samestep.job.fields import Dataset as Dataset
from samestep.job.fields import JobFields
from samestep.job.orders import ByLength as ByLength
from samestep.job.orders import Lanes as Lanes
from samestep.job.orders import Weighted as Weighted
from samestep.job.phases import LRSchedule as LRSchedule
from samestep.job.phases import Phase as Phase
from samestep.job.phases import Recipe as Recipe
from samestep.job.phases import check_phases, in_turn


@dataclass(frozen=True)
class Job(JobFields):
    __doc__ = JobFields.__doc__  # for help(Job)

    def __new__(cls, *values: Any, **named: Any) -> Job:
        refuse_unknown(cls, named)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.phases:
            self._take_phases()
        check_optimizer(self.optimizer, isinstance(self.optimizer, Recipe))
        check_functions(self.model, self.criterion)
        check_dataset("train", self.train)
        if self.evaluation is not None:
            check_dataset("evaluation", self.evaluation)
        if self.shuffle and any(getattr(dataset, "one_order", False) for dataset in nested(self.train)):
            raise UserError("a Stream cannot be shuffled: it is read in its order; set Job(shuffle=False)")
        check_calls({name: getattr(self, name) for name in CALLED})
        for name in ("global_batch", "epochs", "max_steps", "micro_batch", "clip_norm", "prefetch", "seed"):
            value = getattr(self, name)
            kind: Any = Real if name == "clip_norm" else int
            may_be_none = name in ("max_steps", "micro_batch", "clip_norm")
            if not (value is None and may_be_none) and (not isinstance(value, kind) or isinstance(value, bool)):
                words = "a number" if kind is Real else "a whole number"
                given = repr(value) if isinstance(value, Real) else shown(value)
                raise UserError(f"{name} is {given}, a {type(value).__name__}; it must be {words}")
            if value is not None and not value > 0 and name != "seed":
                rows = ": it is the rows of one step, over all ranks" if name == "global_batch" else ""
                raise UserError(f"{name} is {value}; it must be above 0{rows}")
        if not isinstance(self.workers, int) or self.workers < 0:
            raise UserError(f"workers is {self.workers!r}; it must be a whole number, 0 or above")
        check_workers(self.workers)
        if self.gather_outputs and self.micro_batch is not None:
            raise UserError(
                f"micro_batch is {self.micro_batch}, and gather_outputs=True computes the loss over all rows of a step "
                "at once; leave out one of them"
            )
        check_metrics(self.metrics)
        for name in {"loss", "step"} & {*self.metrics}:
            raise UserError(
                f"a metric is called '{name}', a name that the evaluation curve uses itself; give it another name"
            )
        if self.last not in ("keep", "drop"):
            raise UserError(f"last is '{self.last}'; it must be 'keep' or 'drop'")
        if self.save not in ("all", "trainable"):
            raise UserError(f"save is '{self.save}'; it must be 'all' or 'trainable'")
        if self.ema is not None and not (isinstance(self.ema, Real) and 0 < self.ema < 1):
            raise UserError(f"ema is {shown(self.ema)}; it is a decay between 0 and 1, such as 0.999")
        self._check_scheduler()
        self._check_order()

    def _check_order(self) -> None:
        if self.order is not None and not self.shuffle:
            raise UserError("order and shuffle=False each say the order of the rows; leave out one of them")
        if isinstance(self.order, Weighted | ByLength):
            self.order.check(len(self.train))
        elif self.order is not None and not isinstance(self.order, Lanes) and not callable(self.order):
            kind = type(self.order).__name__
            raise UserError(
                f"order is a {kind}; give Weighted, ByLength, Lanes() or a function (epoch, generator) -> indices"
            )
        if self.carry_state:
            in_lanes = not (self.order is None or isinstance(self.order, Weighted | ByLength)) or not self.shuffle
            if self.phases:
                raise UserError(
                    "carry_state=True with phases: each phase would take the state of the one before it; leave out one"
                )
            check_carried(self.forward is apply_to_inputs, in_lanes, self.last, self.optimizer.needs_closure)
        if self.last == "drop" and self.order is None and len(self.train) < self.global_batch:
            raise UserError(
                f"last=drop leaves no step: the dataset has {len(self.train)} rows, fewer than global_batch "
                f"{self.global_batch}; set a smaller global_batch or last=keep"
            )

    def _take_phases(self) -> None:
        """Sets the optimizer, and what evaluation uses, from the phases."""
        check_phases(self.phases, self.model, self.optimizer)
        phases = tuple(replace(phase, forward=phase.forward or self.forward) for phase in self.phases)
        object.__setattr__(self, "phases", phases)
        object.__setattr__(self, "optimizer", in_turn(phases))
        if self.criterion is None:
            object.__setattr__(self, "criterion", phases[0].criterion)
            object.__setattr__(self, "forward", phases[0].forward)

    def of_phases(self) -> list[Job]:
        """Returns a job for each phase, with its criterion, forward and optimizer; without phases the job itself."""
        return [
            replace(self, phases=(), criterion=p.criterion, forward=p.forward or self.forward, optimizer=p.optimizer)
            for p in self.phases
        ] or [self]

    def _check_scheduler(self) -> None:
        if self.scheduler is None:
            return
        if not isinstance(self.scheduler, LRSchedule):
            raise UserError(
                f"scheduler is {shown(self.scheduler)}; it is built with the optimizer: write "
                "scheduler=LRSchedule(lambda optimizer: CosineAnnealingLR(optimizer, 100))"
            )
        if not callable(self.scheduler.make):
            raise UserError(
                f"LRSchedule is given {shown(self.scheduler.make)}; give a function of the optimizer: "
                "LRSchedule(lambda optimizer: CosineAnnealingLR(optimizer, 100))"
            )
        every, metric = self.scheduler.every, self.scheduler.metric
        if every not in ("step", "epoch", "evaluation"):
            raise UserError(f"the scheduler's every is '{every}'; it must be 'step', 'epoch' or 'evaluation'")
        if every == "evaluation" and self.evaluation is None:
            raise UserError("the scheduler's every is 'evaluation', and the job has none; give it Job(evaluation=…)")
        if every == "evaluation" and metric not in ("loss", *self.metrics):
            raise UserError(f"the scheduler's metric is '{metric}'; {nearest(metric, ['loss', *self.metrics])}")
