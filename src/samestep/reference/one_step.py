"""One step of a long training, replayed from the state that it began with: every replica in turn, in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.engine import Layout
from samestep.job import Job
from samestep.records.training_record import MicroBatchRecord
from samestep.reference.noise import Noise
from samestep.reference.optimizers import phases_of, scheduled
from samestep.reference.play import ReplicatedTraining, State
from samestep.reference.schedule import per_epoch

AnyState = Mapping[str, Any]


@dataclass(frozen=True)
class ReplicaBefore:
    """What one replica begins a step with besides the weights."""

    buffers: State
    """The replica's buffers, by name."""

    moved: State = field(default_factory=dict)
    """The replica's copies of parameters, by name. Those that the forward pass moves are taken."""

    attributes: Mapping[str, AnyState] = field(default_factory=dict)
    """Module -> attribute -> value."""

    carried: Mapping[int, Any] = field(default_factory=dict)
    """Micro-batch -> the state that forward has returned."""

    carried_epoch: int = -1
    """The epoch in which forward has returned these states. -1: there are none."""


@dataclass(frozen=True)
class StepBefore:
    """What a step begins with."""

    step: int
    """The number of the step in the whole schedule."""

    weights: State
    """The parameters, by name."""

    optimizer: Mapping[str, AnyState]
    """The optimizer's state: name of a parameter -> key -> value."""

    groups: list[AnyState]
    """The numbers of each parameter group, such as its learning rate."""

    averages: State
    """The averages of the weights, by name. Empty: the job does not average them."""

    extra: AnyState
    """Module -> what its get_extra_state returned."""

    replicas: list[ReplicaBefore]
    """What each replica begins the step with."""

    autocast: str | None = None
    """The dtype to which autocast lowers the forward passes. None: the tensors' own dtypes."""

    loss_scale: float = 1.0
    """The factor by which losses are multiplied."""


@dataclass(frozen=True)
class StepAfter:
    """What a step has made."""

    micro_batches: list[list[MicroBatchRecord]]
    """What each replica saw: [replica][micro-batch]."""

    own_gradients: list[State]
    """The gradient of each replica before the mean, by name. Empty: the replicas share forward passes."""

    weights: State
    """The parameters after the step, by name."""

    buffers: list[State]
    """The buffers of each replica after the step."""

    optimizer: Mapping[str, AnyState]
    """The optimizer's state after the step: name of a parameter -> key -> value."""

    averages: State
    """The averages of the weights after the step, by name."""

    moved: list[State]
    """Each replica's copies of the parameters that the forward pass moves, after the step."""


def replay_step(
    job: Job,
    layout: Layout,
    before: StepBefore,
    *,
    noise: Noise | None = None,
    device: str = "cpu",
    moved: Collection[str] = (),
) -> StepAfter:
    """Takes one optimizer step as N replicas must. moved: the parameters that the forward pass moves.

    The learning rate is that of `before`: see Rates.
    """
    job = replace(_autocast(job, before.autocast, device), scheduler=None)
    training = ReplicatedTraining(job, layout, noise, device, None, moved)
    training.loss_scale = before.loss_scale
    if not (layout.replicas > 1 and (job.gather_outputs or job.sync_batchnorm)):
        training.own_gradients = {}
    names = dict(training.model.named_parameters())
    _load(training, before, names)
    if noise:
        noise.perturb(training.model.parameters())
    training.step(before.step, before.step)
    trained = [name for name, parameter in names.items() if parameter.requires_grad]
    own_gradients = training.own_gradients or {}
    optimizer = {id(p): state for phase in training.phases for p, state in phase.optimizer.state.items()}
    return StepAfter(
        micro_batches=[training.micro_batches[replica] for replica in training.replicas],
        own_gradients=[
            {
                name: gradient
                for name, gradient in zip(trained, own_gradients[replica], strict=True)
                if gradient is not None
            }
            for replica in sorted(own_gradients)
        ],
        weights={name: parameter.detach() for name, parameter in names.items()},
        buffers=[state.buffers for state in training.states],
        optimizer={name: optimizer[id(parameter)] for name, parameter in names.items() if id(parameter) in optimizer},
        averages=training.average,
        moved=[state.parameters for state in training.states],
    )


def _load(training: ReplicatedTraining, before: StepBefore, names: Mapping[str, nn.Parameter]) -> None:
    device = training.device
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(before.weights[name])
    for name, module in training.model.named_modules():
        if name in before.extra:
            module.set_extra_state(before.extra[name])
    for group, numbers in zip(training.scheduled.param_groups, before.groups, strict=True):
        for key, value in numbers.items():
            group[key] = value.clone() if isinstance(value, Tensor) else value
    for phase in training.phases:
        of_names = {id(parameter): name for name, parameter in names.items()}
        for parameter in (parameter for group in phase.optimizer.param_groups for parameter in group["params"]):
            values = before.optimizer.get(of_names[id(parameter)])
            if values is not None:
                phase.optimizer.state[parameter] = {
                    key: value.to(value.device if key == "step" else device).clone()
                    if isinstance(value, Tensor)
                    else value
                    for key, value in values.items()
                }
    training.average = {name: average.to(device).clone() for name, average in before.averages.items()}
    for replica, (state, replica_before) in enumerate(zip(training.states, before.replicas, strict=True)):
        state.buffers = {name: buffer.to(device) for name, buffer in replica_before.buffers.items()}
        state.parameters = {name: replica_before.moved[name].to(device) for name in training.moved}
        for name, attributes in replica_before.attributes.items():
            if name in state.attributes:
                state.attributes[name] |= attributes
        training.epoch = replica_before.carried_epoch
        for micro, carried in replica_before.carried.items():
            training.carried.states[replica, micro] = carried


def _autocast(job: Job, dtype: str | None, device: str) -> Job:
    """Returns a job whose forward and criterion compute in `dtype` where torch.autocast lowers to it."""
    if dtype is None:
        return job

    def lowered(function: Callable[..., Any] | None) -> Any:
        return function and torch.autocast(device.partition(":")[0], getattr(torch, dtype))(function)

    phases = [
        replace(phase, criterion=lowered(phase.criterion), forward=lowered(phase.forward)) for phase in job.phases
    ]
    return replace(job, criterion=lowered(job.criterion), forward=lowered(job.forward), phases=phases)


class Rates:
    """The learning rates of a job's schedule, counted from its beginning, whatever a training has made of them."""

    def __init__(self, job: Job) -> None:
        self.job, self.moves = job, 0
        self.phases = max(1, len(job.phases))
        played = phases_of(job, job.model())
        self.optimizer = scheduled(played)
        for group in self.optimizer.param_groups:
            group["params"] = [nn.Parameter(torch.zeros(1))] if group["params"] else []  # the model's memory is freed
        self.scheduler = job.scheduler.make(self.optimizer) if job.scheduler else None

    def at(self, step: int) -> list[float] | None:
        """Returns each parameter group's rate at a step; None for one that depends on evaluations.

        Steps must not go back.
        """
        every = self.job.scheduler.every if self.job.scheduler else "step"
        if every == "evaluation":
            return None
        due = step // self.phases if every == "step" else step // per_epoch(self.job)
        while self.scheduler and self.moves < due:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else a scheduler warns
            self.scheduler.step()
            self.moves += 1
        return [float(group["lr"]) for group in self.optimizer.param_groups]
