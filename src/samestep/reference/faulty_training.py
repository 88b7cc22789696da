"""The reference's training with a candidate fault in it, which a hypothesis describes: see hypotheses.py.

Each replica's gradient is computed by itself, and the replicas may have weights of their own where a fault parts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.bounds import CLIP_EPS
from samestep.engine import Layout
from samestep.job import Job
from samestep.records.training_record import MicroBatchRecord
from samestep.reference.fetch import seed
from samestep.reference.held_randomness import HeldRandomness
from samestep.reference.optimizers import Closure, Gradient, PlayedPhase
from samestep.reference.play import Forward, ReplicatedTraining
from samestep.reference.replica_state import ReplicaState, follow_first
from samestep.reference.schedule import per_epoch, step_rows


@dataclass(frozen=True)
class Moment:
    """One step of a training."""

    step: int
    """The number of the step in the training, from 0."""

    schedule_step: int
    """The number of the step in the whole schedule, from 0."""

    epoch: int
    """The number of the epoch, from 0."""

    epoch_begins: bool
    """Whether an epoch begins with this step, other than the training's first."""

    epoch_ends: bool
    """Whether this is the last step of its epoch."""

    again: bool = False
    """Whether a closure has the gradient of the step computed once more."""

    micro_batches: int = 1
    """How many micro-batches each replica has in this step."""


@dataclass(frozen=True)
class Part:
    """A replica's micro-batch among all rows of a step: what its loss is weighed by."""

    weight: float
    """The weight of the micro-batch's rows."""

    of_replica: float
    """The weight of all rows of the replica in this step."""

    total: float
    """The weight of all rows of all replicas in this step."""

    rows: int
    """The number of rows of the micro-batch."""

    all_rows: int
    """The number of rows of all replicas in this step."""

    replicas: int
    """The number of replicas."""

    micro_batches: int
    """The number of micro-batches of each replica in this step."""


Gradients = list[Gradient]  # of each replica


def summed(gradients: Iterable[Gradient]) -> Gradient:
    """The sum of several gradients; None where none of them has a parameter's."""
    sums: Gradient = []
    for tensors in zip(*gradients):
        given = [tensor for tensor in tensors if tensor is not None]
        sums.append(sum(given[1:], given[0]) if given else None)
    return sums


def mean_over_replicas(sums: Gradients, replicas: int) -> Gradients:
    """What an all-reduce leaves on every replica: the mean."""
    mean = [None if tensor is None else tensor / replicas for tensor in summed(sums)]
    return [mean] * replicas


def clipped(gradients: Gradients, job: Job) -> Gradients:
    """The gradients after the job's clipping."""
    return each_distinct(gradients, lambda gradient: by_norm(gradient, job.clip_norm))


def by_norm(gradient: Gradient, limit: float | None, order: float = 2.0) -> Gradient:
    """One gradient, scaled to at most a norm of `limit`."""
    given = [tensor for tensor in gradient if tensor is not None]
    if limit is None or not given:
        return gradient
    norm = torch.nn.utils.get_total_norm(given, order)
    scale = float((limit / (norm + CLIP_EPS)).clamp(max=1.0))
    return [None if tensor is None else tensor * scale for tensor in gradient]


def each_distinct(gradients: Gradients, change: Callable[[Gradient], Gradient]) -> Gradients:
    """Changes each replica's gradient; one that all replicas share, once."""
    if all(gradient is gradients[0] for gradient in gradients):
        return [change(gradients[0])] * len(gradients)
    return [change(gradient) for gradient in gradients]


def forward_as_it_is(job: Job) -> Job:
    return job


@dataclass(frozen=True)
class Hypothesis:
    """One candidate fault: what a step does otherwise where the fault acts. Each function's default is what is
    right."""

    id: str
    """The id of the message that names the fault."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields of that message."""

    delay: int = 1
    """How many steps later than the step where the fault acts a loss shows it."""

    parts_ways: bool = False
    """Whether the weights of the replicas become different from each other."""

    general: bool = False
    """Whether the fault fits one number to what was found: see Trial."""

    once: bool = False
    """Whether the fault acts everywhere or nowhere, as a setting does."""

    shows_at_end: bool = False
    """Whether no loss shows the fault, wherever it acts, and the final weights do."""

    job: Callable[[Job], Job] = forward_as_it_is
    """Returns the job that is trained instead of the right one."""

    layout: Callable[[Layout], Layout] = lambda layout: layout
    """Returns the layout of the replicas instead of the right one."""

    weighs: Callable[[Part], float] = lambda part: 1.0
    """Returns the factor by which a replica's part of the loss is multiplied. 1: the right one."""

    micro_batches: Callable[[Sequence[Gradient], Callable[[Gradient], Gradient]], Gradient] | None = None
    """Called as micro_batches(gradients, clip) with a replica's gradients of each micro-batch, and a function that
    clips one to the job's norm. Returns the gradient that is reduced. None: `of_replica` of their sum."""

    of_replica: Callable[[Gradient], Gradient] = lambda gradient: gradient
    """Changes a replica's gradient, summed over its micro-batches, before the reduction."""

    reduce: Callable[[Gradients, int], Gradients] = mean_over_replicas
    """Called as reduce(sums, replicas). Returns what each replica has after the reduction."""

    last_is_own: bool = False
    """Whether each replica has its own gradient of the last micro-batch, which is not reduced."""

    reduced: Callable[[Gradient], Gradient] = lambda gradient: gradient
    """Changes each gradient after the reduction."""

    clip: Callable[[Gradients, Job], Gradients] = clipped
    """Called as clip(gradients, job). Returns each replica's gradient after clipping, as `clipped` does."""

    keeps: bool = False
    """Whether the gradient of the step before is still there, and is added."""

    steps: int = 1
    """How many steps the optimizer takes."""

    forgets: bool = False
    """Whether the optimizer's state is lost before its step."""

    schedules: Callable[[FaultyTraining], int] = lambda training: 1
    """Returns how many times the scheduler is stepped instead of once."""

    schedules_first: bool = False
    """Whether the scheduler is stepped before the optimizer."""

    schedules_each_phase: bool = False
    """Whether the scheduler is stepped after each phase, instead of the last one alone."""

    averages: int = 1
    """How often the averaged weights are updated."""

    averages_first: bool = False
    """Whether the averaged weights are updated before the optimizer's step."""

    decay: Callable[[float, int], float] = lambda decay, updates: decay
    """Called as decay(decay, updates) with the job's decay, and the number of updates before. Returns the decay of the
    averaged weights."""

    after: Callable[[FaultyTraining, PlayedPhase], None] = lambda training, phase: None
    """Called as after(training, phase) after the optimizer's step. Changes the weights or the optimizer's state."""

    around: Callable[[FaultyTraining], AbstractContextManager[Any]] = lambda training: nullcontext()
    """Returns a context in which the forward and the backward pass are computed."""

    job_of_step: Callable[[Job], Job] = forward_as_it_is
    """Returns the job of the forward pass instead of the phase's."""

    masks: Callable[[int, int, int], tuple[int, int, int]] = lambda step, micro, replica: (step, micro, replica)
    """Called as masks(step, micro-batch, replica). Returns the three numbers that seed the random numbers instead."""

    carries: Callable[[FaultyTraining], None] = lambda training: None
    """Changes the state that rows carry, before a step."""

    carries_over_epochs: bool = False
    """Whether the state that rows carry is kept where an epoch begins."""

    ends: Callable[[FaultyTraining], None] = lambda training: None
    """Changes the final weights."""


HEALTHY = Hypothesis("healthy")


class FaultyTraining(ReplicatedTraining):
    """A replicated training in which a hypothesis acts at the steps that `acts` names."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        device: str,
        hypothesis: Hypothesis,
        acts: Callable[[Moment], bool],
        moved: Iterable[str] = (),
        held_randomness: HeldRandomness | None = None,
    ) -> None:
        self.hypothesis, self.acts = hypothesis, acts
        self.now = HEALTHY  # the hypothesis where it acts in this step
        if hypothesis.parts_ways:
            moved = {*moved, *(name for name, p in job.model().named_parameters() if p.requires_grad)}
        super().__init__(hypothesis.job(job), hypothesis.layout(layout), None, device, held_randomness, list(moved))
        self.before: Gradients = []  # the gradients of the step before, which were cleared
        self.gradients: Gradients = []
        self.optimizer_states: dict[int, list[Any]] = {}  # phase -> of each replica
        self.moment = Moment(-1, -1, -1, False, False)
        self.updates = 0  # of the averaged weights

    def _moment(self, step: int, schedule_step: int) -> Moment:
        length = per_epoch(self.job)
        epoch = schedule_step // length
        begins = step > 0 and epoch != self.moment.epoch and self.moment.step != step
        begins |= self.moment.step == step and self.moment.epoch_begins
        micro_batches = len(step_rows(self.job, self.layout, schedule_step))
        ends, again = (schedule_step + 1) % length == 0, self.moment.step == step
        return Moment(
            step,
            schedule_step,
            epoch,
            epoch_begins=begins,
            epoch_ends=ends,
            again=again,
            micro_batches=micro_batches,
        )

    def step(self, step: int, scheduled_step: int) -> list[float]:
        """As of the training without a fault."""
        if self.hypothesis.carries_over_epochs:
            self.epoch = scheduled_step // per_epoch(self.job)
        return super().step(step, scheduled_step)

    def _evaluated(
        self, step: int, scheduled_step: int, phase: PlayedPhase
    ) -> tuple[list[tuple[int, MicroBatchRecord]], float]:
        self.moment = self._moment(step, scheduled_step)
        now = self.now = self.hypothesis if self.acts(self.moment) else HEALTHY
        now.carries(self)
        plan = step_rows(self.job, self.layout, scheduled_step)
        if self.layout.buffers == "rank0":
            for state in self.states[1:]:
                state.buffers = {name: tensor.clone() for name, tensor in self.states[0].buffers.items()}
        forwards = self._forwards(phase, step, scheduled_step, plan)
        micro_batches, parts = self._parts(forwards)
        if not self.hypothesis.parts_ways:
            follow_first(self.states, plan)
        own_gradients = [parts[replica].pop() for replica in self.replicas] if now.last_is_own else []
        sums = [self._of_replica(parts[replica]) for replica in self.replicas]
        gradients = each_distinct(now.reduce(sums, self.layout.replicas), now.reduced)
        if own_gradients:
            gradients = [summed(pair) for pair in zip(gradients, own_gradients)]
        if now.keeps and self.before:
            gradients = [summed(pair) for pair in zip(gradients, self.before)]
        self.gradients = self.before = now.clip(gradients, self.job)
        for parameter, gradient in zip(self.parameters, self.gradients[0]):
            parameter.grad = None if gradient is None else gradient.clone()
        return micro_batches, 0.0

    def _parts(self, forwards: list[Forward]) -> tuple[list[tuple[int, MicroBatchRecord]], dict[int, list[Gradient]]]:
        """[replica] -> the gradient of each of its micro-batches, and what each replica saw."""
        shares_passes = self.layout.replicas > 1 and (self.job.gather_outputs or self.job.sync_batchnorm)
        places = [(forward, replica) for replica in self.replicas for forward in forwards]
        if shares_passes:
            places = [(forward, replica) for forward in forwards for replica in self.replicas]
        micro_batches, parts = [], defaultdict(list)
        for forward, replica in places:
            if shares_passes and self.job.gather_outputs and forward.all_rows is None:
                forward.all_rows = self._over_all_rows(forward)
            self._clear_gradients()
            micro_batches.append((replica, self._micro_batch(forward, replica)))
            factor = self._factor(forwards, forward, replica)
            parts[replica].append([None if p.grad is None else p.grad * factor for p in self.parameters])
        self._clear_gradients()
        return micro_batches, parts

    def _factor(self, forwards: list[Forward], forward: Forward, replica: int) -> float:
        rows = forward.rows[replica]
        if not rows:
            return 1.0
        of_replica = sum(other_forward.weights[replica] for other_forward in forwards)
        all_rows = sum(len(rows) for other_forward in forwards for rows in other_forward.rows)
        weighs, replicas = forward.weights[replica], self.layout.replicas
        return self.now.weighs(
            Part(weighs, of_replica, forward.total, len(rows), all_rows, replicas, micro_batches=len(forwards))
        )

    def _of_replica(self, parts: Sequence[Gradient]) -> Gradient:
        if self.now.micro_batches is not None:
            return self.now.micro_batches(parts, lambda gradient: by_norm(gradient, self.job.clip_norm))
        return self.now.of_replica(summed(parts))

    def _micro_batch(self, forward: Forward, replica: int) -> MicroBatchRecord:
        rows = forward.rows[replica]
        data, weighs = self._data(forward, rows), forward.weights[replica]
        loss = self._forward_and_backward(forward, replica, data, weighs) if rows else 0.0
        return MicroBatchRecord(
            forward.epoch, forward.step, forward.micro, indices=rows, weight=weighs, digests=[], loss=loss
        )

    def _forward_and_backward(self, forward: Forward, replica: int, data: Any, weighs: float) -> float:
        phase = replace(forward.phase, job=self.now.job_of_step(forward.phase.job))
        changed = forward if phase.job is forward.phase.job else replace(forward, phase=phase)
        with self.now.around(self):
            return super()._forward_and_backward(changed, replica, data, weighs)

    def _seed(self, step: int, micro: int, replica: int) -> None:
        seed(self.device, self.job.seed, "replica", *self.now.masks(step, micro, replica))

    def _optimizer_step(self, phase: PlayedPhase, closure: Closure, step: int, *, ends_epoch: bool) -> None:
        now = self.now
        if now.averages_first and self.job.ema:
            self._average_weights(phase)
        if now.schedules_first:
            self._schedule(phase, step, ends_epoch=ends_epoch)
        if now.forgets:
            phase.optimizer.state.clear()
            self.optimizer_states.pop(phase.number, None)
        for _ in range(now.steps):
            self._update(phase, closure)
        now.after(self, phase)
        if self.job.ema and not now.averages_first:
            for _ in range(now.averages):
                self._average_weights(phase)
        if not now.schedules_first:
            self._schedule(phase, step, ends_epoch=ends_epoch)

    def _update(self, phase: PlayedPhase, closure: Closure) -> None:
        if not self.hypothesis.parts_ways:
            super()._update(phase, closure)
            return
        self.rates.append([float(group["lr"]) for group in self.scheduled.param_groups if group["params"]])
        states = self.optimizer_states.setdefault(phase.number, [])
        while len(states) < self.layout.replicas:
            states.append(defaultdict(dict))
        for replica, gradient in enumerate(self.gradients):
            self.states[replica].restore(self.model)
            phase.optimizer.state = states[replica]
            for parameter, of_parameter in zip(self.parameters, gradient):
                parameter.grad = None if of_parameter is None else of_parameter.clone()
            phase.optimizer.step()
            self.states[replica] = ReplicaState(self.model, self.moved)
        self.states[0].restore(self.model)

    def _average_weights(self, phase: PlayedPhase) -> None:
        self.decay = self.now.decay(self.job.ema or 0.0, self.updates)
        self.updates += 1
        super()._average_weights(phase)

    def _schedule(self, phase: PlayedPhase, step: int, *, ends_epoch: bool) -> None:
        last = self.phases[-1]
        for _ in range(self.now.schedules(self)):
            super()._schedule(last if self.now.schedules_each_phase else phase, step, ends_epoch=ends_epoch)

    def final_state(self) -> dict[str, Tensor]:
        """The weights as they are saved, with replica 0's buffers."""
        self.hypothesis.ends(self)
        return self.state()


@contextmanager
def in_evaluation_mode(training: FaultyTraining) -> Iterator[None]:
    """The model in evaluation mode, as one is left in that nothing returns to training mode."""
    modes = {module: module.training for module in training.model.modules()}
    training.model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def losing_what_forward_writes(
    names: Sequence[str], *, at_each_module: bool
) -> Callable[[FaultyTraining], AbstractContextManager[Any]]:
    """Returns a context in which these parameters have the values from before the forward pass again after it, for the
    backward pass, too: as where ranks hold parts of them, and the forward pass is given copies.

    at_each_module: also where a module that holds them begins its own forward pass.
    """

    @contextmanager
    def lost(training: FaultyTraining) -> Iterator[None]:
        parameters = {name: p for name, p in training.model.named_parameters() if name in names}
        before = {id(p): p.detach().clone() for p in parameters.values()}

        def give_back(module: torch.nn.Module, *_: object, recurse: bool = False) -> None:
            for parameter in module.parameters(recurse):
                if id(parameter) in before:
                    # In place and unnoticed, because the graph of the backward pass reads these, too.
                    parameter.data.copy_(before[id(parameter)])

        give_all_back = partial(give_back, recurse=True)
        hooks = [training.model.register_forward_hook(lambda *inputs: give_all_back(training.model))]
        if at_each_module:
            hooks += [module.register_forward_pre_hook(give_back) for module in training.model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            give_all_back(training.model)
            for state in training.states:
                state.parameters |= {n: before[id(parameters[n])].clone() for n in state.parameters if n in parameters}

    return lost
