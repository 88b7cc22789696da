"""What goes on around a training forward: patches, random states, and batches that are joined and split."""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from samestep.job.walk import leaves_of
from samestep.recorder.patches import Around, patch_forwards, trains


class CannotConcatenate(Exception):
    """Batches that cannot be concatenated. The message says why."""


def patch_training_forwards(around: Around) -> None:
    """Calls around(call, module, args, kwargs) for each training forward of an outermost module, instead of it."""

    def training(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if trains(module) and any(p.requires_grad for p in module.parameters()):
            return around(call, module, args, kwargs)
        return call(*args, **kwargs)

    patch_forwards(training)


class Outputs:
    """Knows the tensors that models have returned, and what shares their memory, as detach() does."""

    def __init__(self) -> None:
        self._known: set[StorageWeakRef] = set()

    def add(self, output: Any) -> None:
        """Takes note of what a model has returned; forgets what is no longer there."""
        new = {StorageWeakRef(leaf.untyped_storage()) for leaf in _tensors(output)}
        self._known = {each for each in self._known if not each.expired()} | new

    def are_used_in(self, inputs: Any) -> bool:
        """Whether a model's inputs are computed from one of these outputs."""
        of = _tensors(inputs)
        return any(leaf.requires_grad or StorageWeakRef(leaf.untyped_storage()) in self._known for leaf in of)


def _tensors(data: Any) -> list[Tensor]:
    """Returns the tensors of floating point that a tree holds."""
    return [leaf for leaf in leaves_of(data) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def random_states() -> list[Tensor]:
    """Returns the states of torch's generators: the CPU's, and the current GPU's where it is in use."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


def set_random_states(states: Sequence[Tensor]) -> None:
    """Sets the states that random_states() has returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states[1])


def randomness() -> str:
    """Returns a digest of the states of all generators that a script is likely to use."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in random_states():
        state.update(tensor.numpy().tobytes())
    state.update(repr(random.getstate()).encode())
    if numpy := sys.modules.get("numpy"):
        state.update(pickle.dumps(numpy.random.get_state()))
    return state.hexdigest()


def copied(data: Any) -> Any:
    """Returns a copy of a batch or a forward's inputs, on the CPU, without its graph."""
    if isinstance(data, Tensor):
        return data.detach().cpu().clone()
    return _mapped(data, [data], lambda each: copied(each[0])) if _is_tree(data) else copy.deepcopy(data)


def joined(parts: Sequence[Any]) -> Any:
    """Returns the ranks' batches as one: tensors and lists are put together, all else must be the same.

    Raises CannotConcatenate where rows have different shapes.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        if not first.dim():
            if any(not torch.equal(first, each) for each in parts):
                raise CannotConcatenate("the ranks' batches hold different scalars")
            return first
        if len({each.shape[1:] for each in parts}) > 1:
            raise CannotConcatenate(
                "the rows of the ranks' batches have different shapes (padded to each batch's longest)"
            )
        return torch.cat(list(parts))
    if _is_tree(first):
        return _mapped(first, parts, joined)
    if isinstance(first, list):
        return [value for each in parts for value in each]
    return first


def is_joined(whole: Any, parts: Sequence[Any]) -> bool:
    """Whether inputs are those of the ranks, put together along the rows or, of a sequence, along another dimension.

    What all ranks have alike must be the same.
    """
    if isinstance(whole, Tensor):
        mine = whole.detach().cpu()
        if all(each.shape == mine.shape for each in parts):
            return all(torch.equal(each, mine) for each in parts)
        dims = [d for d in range(mine.dim()) if sum(each.shape[d] for each in parts) == mine.shape[d]]
        rest = {d: [(*each.shape[:d], *each.shape[d + 1 :]) for each in (mine, *parts)] for d in dims}
        return any(len({*rest[d]}) == 1 and torch.equal(torch.cat(list(parts), d), mine) for d in dims)
    if hasattr(whole, "keys"):
        return all(each.keys() == whole.keys() for each in parts) and all(
            is_joined(whole[key], [each[key] for each in parts])
            for key in whole.keys()  # noqa: SIM118
        )
    if isinstance(whole, tuple | list):
        return all(len(each) == len(whole) for each in parts) and all(map(is_joined, whole, zip(*parts)))
    return bool(all(each == whole for each in parts))


def split(data: Any, sizes: Sequence[int], number: int, device: Any = None) -> Any:
    """Returns the rows of one rank of a joined batch, or of a model's inputs."""
    if isinstance(data, Tensor):
        return data.split(list(sizes))[number] if data.dim() and len(data) == sum(sizes) else data
    return _mapped(data, [data], lambda each: split(each[0], sizes, number)) if _is_tree(data) else data


def joined_outputs(parts: Sequence[Any]) -> Any:
    """Returns the outputs of a model that was called for each rank's rows: scalars are averaged."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.dim() else torch.stack(list(parts)).mean()
    return _mapped(first, parts, joined_outputs) if _is_tree(first) else first


def scalars(data: Any) -> bool:
    """Whether a model's output holds a loss: a scalar with a gradient."""
    if isinstance(data, Tensor):
        return not data.dim() and data.requires_grad
    if hasattr(data, "keys"):
        return any(scalars(data[key]) for key in data.keys())  # noqa: SIM118
    return isinstance(data, tuple | list) and any(scalars(each) for each in data)


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
    return isinstance(data, tuple) or (isinstance(data, list) and any(isinstance(each, Tensor) for each in data))


def _mapped(first: Any, parts: Sequence[Any], function: Callable[[list[Any]], Any]) -> Any:
    """Returns a mapping or sequence of the same kind, whose values are function([that value of each part])."""
    if hasattr(first, "keys"):
        values = {key: function([each[key] for each in parts]) for key in first.keys()}  # noqa: SIM118
        if type(first) is dict:
            return values
        try:
            return type(first)(**values)  # the outputs of transformers' models
        except TypeError:
            return type(first)(values)  # its batches
    return _sequence(first, [function([each[i] for each in parts]) for i in range(len(first))])


def _sequence(like: Any, values: list[Any]) -> Any:
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)
