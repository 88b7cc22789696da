"""What a replica keeps between two batches besides its weights: buffers, attributes such as a hidden state,
parameters that the forward pass moves, such as an averaged teacher's, and the state that forward carries on."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from samestep.job import Batch, Job, output_and_state
from samestep.job.walk import mapped_tensors

OWN = frozenset(vars(nn.Module()))  # attributes that every module has, such as its parameters
COPIED = (list, dict, set, deque)
SMALL = 1 << 20  # elements; a larger tensor is a constant, such as a mask, rather than a state

Attributes: TypeAlias = "dict[str, dict[str, object]]"  # module -> attribute -> value


class ReplicaState:
    """The buffers and attributes of `model`, and its parameters named `moved`, now. `restore` gives the model these
    again."""

    def __init__(self, model: nn.Module, moved: Collection[str] = ()) -> None:
        self.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        self.parameters = {name: p.detach().clone() for name, p in model.named_parameters() if name in moved}
        self.attributes: Attributes = {name: _attributes(module) for name, module in model.named_modules()}

    def restore(self, model: nn.Module) -> None:
        """Copies the buffers into the model's, and replaces the attributes of its modules."""
        buffers = dict(model.named_buffers())
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                buffers[name].data.copy_(buffer)
            for name, parameter in model.named_parameters():
                if name in self.parameters:
                    parameter.data = self.parameters[name].clone()  # a graph may hold the tensor that it had
        for name, module in model.named_modules():
            for attribute in vars(module).keys() - OWN:
                del vars(module)[attribute]
            vars(module).update({key: _copied(value) for key, value in self.attributes[name].items()})

    def changed(self, later: ReplicaState) -> list[str]:
        """Returns the names of the buffers and of the tensor attributes that are another in `later`."""
        moved = [name for name, buffer in self.buffers.items() if not _equal(buffer, later.buffers[name])]
        for name, attributes in later.attributes.items():
            before = self.attributes.get(name, {})
            moved += [
                f"{name}.{key}".lstrip(".")
                for key, value in attributes.items()
                if isinstance(value, Tensor) and not (key in before and _equal(value, before[key]))
            ]
        return moved


def follow_first(states: Sequence[ReplicaState], plan: Sequence[Sequence[Sequence[int]]]) -> None:
    """Gives a replica without rows the moved parameters of replica 0: its rank computes other ranks' rows, times zero,
    which moves a teacher as theirs do. plan: [micro-batch][replica] -> rows."""
    for replica, state in enumerate(states):
        if replica and not all(of_replica[replica] for of_replica in plan):
            state.parameters = {name: tensor.clone() for name, tensor in states[0].parameters.items()}


def sums_of_parameters(model: nn.Module) -> dict[str, float]:
    """A sum of each parameter, which tells whether it has moved, at no cost in memory."""
    return {name: float(parameter.detach().double().sum()) for name, parameter in model.named_parameters()}


class Carried:
    """What forward has returned for each (replica, micro-batch) in this epoch, without its graph."""

    def __init__(self, job: Job) -> None:
        self.carries = job.carry_state
        self.states: dict[tuple[int, int], Any] = {}

    def forget(self) -> None:
        """Forgets the states at the start of an epoch."""
        self.states.clear()

    def of(self, replica: int, micro: int) -> Any:
        """The state that the rows of a replica's micro-batch begin with."""
        return self.states.get((replica, micro))

    def keep(self, returned: Any, replica: int, micro: int) -> Any:
        """Takes the state out of what forward returned. Returns the output."""
        if not self.carries:
            return returned
        output, state = output_and_state(returned)
        self.states[replica, micro] = mapped_tensors(lambda tensor: tensor.detach().clone(), state)
        return output


def output_of(job: Job, model: Any, batch: Batch) -> Any:
    """What forward returns for a batch that continues nothing, without a state."""
    returned = job.forward(model, batch)
    return output_and_state(returned)[0] if job.carry_state else returned


def output_and_loss(job: Job, model: Any, batch: Batch) -> tuple[Any, Any]:
    """The same, and the criterion of it."""
    output = output_of(job, model, batch)
    return output, job.criterion(output, batch)


def _attributes(module: nn.Module) -> dict[str, object]:
    return {name: _copied(value) for name, value in vars(module).items() if name not in OWN}


def _copied(value: Any) -> Any:
    """A copy of what may be changed in place. A tensor within a graph cannot be: it was computed."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.grad_fn is None:
        return value.detach().clone() if value.numel() <= SMALL else value
    return type(value)(value) if type(value) in COPIED else value


def _equal(value: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor) or value.layout != expected.layout:
        return False
    return value.is_sparse or torch.equal(value, expected)
