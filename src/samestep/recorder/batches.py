"""Batches and models' inputs of several ranks: copied, joined into those of one process, and split again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from samestep.job.walk import leaves_of
from samestep.message import Message, message


class CannotJoin(Exception):
    """Batches that cannot be joined. why: the reason."""

    def __init__(self, why: Message) -> None:
        super().__init__(why)
        self.why = why


def copied(data: Any) -> Any:
    """Returns a copy of a batch or a forward's inputs, on the CPU, without its graph."""
    if isinstance(data, Tensor):
        return data.detach().cpu().clone()
    return _mapped(data, [data], lambda values: copied(values[0])) if _is_tree(data) else copy.deepcopy(data)


def joined(parts: Sequence[Any]) -> Any:
    """Returns the ranks' batches as one: tensors and lists are put together, all else must be the same.

    Raises CannotJoin where rows have different shapes.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        if not first.dim():
            if any(not torch.equal(first, part) for part in parts):
                raise CannotJoin(message("scalars_differ_between_ranks"))
            return first
        if len({part.shape[1:] for part in parts}) > 1:
            raise CannotJoin(message("rows_of_different_shapes"))
        return torch.cat(list(parts))
    if _is_tree(first):
        return _mapped(first, parts, joined)
    if isinstance(first, list):
        return [value for part in parts for value in part]
    return first


def is_joined(inputs: Any, parts: Sequence[Any]) -> bool:
    """Whether inputs are those of the ranks, put together along the rows or, of a sequence, along another dimension.

    What all ranks have alike must be the same.
    """
    if isinstance(inputs, Tensor):
        return _is_joined_tensor(inputs.detach().cpu(), parts)
    if hasattr(inputs, "keys"):
        names = inputs.keys()
        same_names = all(part.keys() == names for part in parts)
        return same_names and all(is_joined(inputs[name], [part[name] for part in parts]) for name in names)
    if isinstance(inputs, tuple | list):
        return all(len(part) == len(inputs) for part in parts) and all(map(is_joined, inputs, zip(*parts)))
    return bool(all(part == inputs for part in parts))


def _is_joined_tensor(inputs: Tensor, parts: Sequence[Tensor]) -> bool:
    if all(part.shape == inputs.shape for part in parts):
        return all(torch.equal(part, inputs) for part in parts)
    for dim in range(inputs.dim()):
        without = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (inputs, *parts)}
        fits = len(without) == 1 and sum(part.shape[dim] for part in parts) == inputs.shape[dim]
        if fits and torch.equal(torch.cat(list(parts), dim), inputs):
            return True
    return False


def split(data: Any, sizes: Sequence[int], number: int) -> Any:
    """Returns the rows of one rank of a joined batch, or of a model's inputs."""
    if isinstance(data, Tensor):
        return data.split(list(sizes))[number] if data.dim() and len(data) == sum(sizes) else data
    return _mapped(data, [data], lambda values: split(values[0], sizes, number)) if _is_tree(data) else data


def joined_outputs(parts: Sequence[Any]) -> Any:
    """Returns the outputs of a model that was called for each rank's rows: scalars are averaged."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.dim() else torch.stack(list(parts)).mean()
    return _mapped(first, parts, joined_outputs) if _is_tree(first) else first


def holds_loss(data: Any) -> bool:
    """Whether a model's output holds a loss: a scalar with a gradient."""
    if isinstance(data, Tensor):
        return not data.dim() and data.requires_grad
    if hasattr(data, "keys"):
        return any(holds_loss(data[key]) for key in data.keys())  # noqa: SIM118
    return isinstance(data, tuple | list) and any(map(holds_loss, data))


def moved_like(data: Any, like: Any) -> Any:
    """Returns inputs on the devices of others of the same structure."""
    if isinstance(data, Tensor):
        return data.to(like.device) if isinstance(like, Tensor) else data
    if not _is_tree(data):
        return data
    if hasattr(data, "keys"):
        return type(data)(**{key: moved_like(data[key], like[key]) for key in data.keys()})  # noqa: SIM118
    return _sequence(data, [moved_like(*pair) for pair in zip(data, like)])


def _is_tree(data: Any) -> bool:
    if hasattr(data, "keys"):
        return True
    return isinstance(data, tuple) or (isinstance(data, list) and any(isinstance(value, Tensor) for value in data))


def _mapped(first: Any, parts: Sequence[Any], function: Callable[[list[Any]], Any]) -> Any:
    """Returns a mapping or sequence of the same kind, whose values are function([that value of each part])."""
    if hasattr(first, "keys"):
        values = {key: function([part[key] for part in parts]) for key in first.keys()}  # noqa: SIM118
        if type(first) is dict:
            return values
        try:
            return type(first)(**values)  # the outputs of transformers' models
        except TypeError:
            return type(first)(values)  # its batches
    return _sequence(first, [function([part[i] for part in parts]) for i in range(len(first))])


def _sequence(like: Any, values: list[Any]) -> Any:
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)


class Outputs:
    """Knows the tensors that models have returned, and what shares their memory, as detach() does."""

    def __init__(self) -> None:
        self._known: set[StorageWeakRef] = set()

    def add(self, output: Any) -> None:
        """Takes note of what a model has returned; forgets what is no longer there."""
        new = {StorageWeakRef(leaf.untyped_storage()) for leaf in _tensors(output)}
        self._known = {storage for storage in self._known if not storage.expired()} | new

    def are_used_in(self, inputs: Any) -> bool:
        """Whether a model's inputs are computed from one of these outputs."""
        return any(
            tensor.requires_grad or StorageWeakRef(tensor.untyped_storage()) in self._known
            for tensor in _tensors(inputs)
        )


def _tensors(data: Any) -> list[Tensor]:
    """Returns the tensors of floating point that a tree holds."""
    return [leaf for leaf in leaves_of(data) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
