"""Replaces functions of torch that have no hook of their own: each replacement calls the recorder first."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.job.foreign import ById, attribute_of, is_a, parameters_in, parts_in
from samestep.job.walk import known_leaves
from samestep.rank.hooks import Hooks, called_by_torch
from samestep.records.divided_models import SMALL
from samestep.records.script import SaveRecord
from samestep.records.torch_collectives import TO_ALL

WORK: Any = torch.distributed.Work
WAITS = ("wait", "get_future")
GATHERS = [function.name for function in TO_ALL if function.kind == "gather"]
Around = Callable[[Callable[..., Any], nn.Module, Any, Any], Any]


class Recording:
    """Whether this process's forwards and backward passes are those of the script. is_paused: while something is
    played."""

    is_paused = False


@contextmanager
def unrecorded() -> Iterator[None]:
    """Runs a block whose forwards and backward passes are not recorded."""
    Recording.is_paused = True
    try:
        yield
    finally:
        Recording.is_paused = False


def patch_forwards(hooks: Hooks, around: Around) -> None:
    """Calls around(call, module, args, kwargs) for each forward of an outermost module, instead of it."""
    inside = threading.local()  # for this replacement alone: another one may be around it

    def new_call(call: Any, self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        is_inside = getattr(inside, "forward", False) or in_backward() or in_transform()
        if is_inside or Recording.is_paused or torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        inside.forward = True
        try:
            return around(functools.partial(call, self), self, args, kwargs)
        finally:
            inside.forward = False

    hooks.attach(nn.Module, "__call__", new_call)


def patch_training_forwards(hooks: Hooks, around: Around) -> None:
    """Calls around(call, module, args, kwargs) for each training forward of an outermost module, instead of it."""

    def training(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if trains(module) and any(parameter.requires_grad for parameter in parameters_in(module)):
            return around(call, module, args, kwargs)
        return call(*args, **kwargs)

    patch_forwards(hooks, training)


def is_in_training_mode(module: nn.Module) -> bool:
    """Returns whether some part of a module is in training mode."""
    return any(attribute_of(part, "training") for part in parts_in(module))


class TrainingMode:
    """Whether a training forward in training mode was seen. Until then the forwards in evaluation mode, with gradients,
    may be those of a training with frozen BatchNorm. A process trains in one of these two modes."""

    was_seen = False


def trains(module: nn.Module) -> bool:
    """Returns whether a forward of a module is a training one, and no evaluation. The one that gives lazy parameters
    their shapes is none."""
    is_training = torch.is_grad_enabled() and (not TrainingMode.was_seen or is_in_training_mode(module))
    return is_training and not _has_lazy_parameters(module)


_WITH_SHAPES = ById[None]()  # modules that are known to have no lazy parameters


def _has_lazy_parameters(module: nn.Module) -> bool:
    if module not in _WITH_SHAPES:
        if any(map(is_lazy, parameters_in(module))):
            return True
        _WITH_SHAPES.put(module, None)
    return False


def in_backward() -> bool:
    """Returns whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() >= 0


def in_transform() -> bool:
    """Returns whether a transform of torch.func goes on (grad, vmap): its tensors have no storage that could be
    read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def patch_autograd(hooks: Hooks, before: Callable[[Any], None], after: Callable[[], None]) -> None:
    """Calls before(loss) and after() around each backward()."""

    def new_backward(backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if Recording.is_paused:
            backward(tensors, *args, **kwargs)
            return
        before(tensors)
        try:
            backward(tensors, *args, **kwargs)
        finally:
            after()

    hooks.attach(torch.autograd, "backward", new_backward)


def make_gradients_small(hooks: Hooks) -> None:
    """Multiplies the gradients of each backward() by a small number."""

    def new_backward(backward: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        # A backward pass inside of another one, as of a checkpoint, is given gradients that are small already.
        if in_backward():
            backward(tensors, grad_tensors, *args, **kwargs)
            return
        roots = [tensors] if is_a(tensors, Tensor) else [*tensors]
        given = [grad_tensors] if grad_tensors is None or is_a(grad_tensors, Tensor) else [*grad_tensors]
        given += [None] * (len(roots) - len(given))
        small = [torch.full_like(r, SMALL) if g is None else g * SMALL for r, g in zip(roots, given)]
        backward(roots, small, *args, **kwargs)

    hooks.attach(torch.autograd, "backward", new_backward)


CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
HUGE = 1e6  # a limit that no gradient reaches: with it, or an infinite one, a clipping only measures the norm


def patch_clipping(hooks: Hooks, before: Callable[[list[Tensor], float | None], None]) -> None:
    """Calls before(parameters, the greatest norm) before gradients are clipped; not where a norm is only measured."""

    def new_clip(name: str, clip: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if is_a(parameters, Tensor) else list(parameters)
        norm = name == "clip_grad_norm_" and float(kwargs.get("norm_type", args[1] if len(args) > 1 else 2)) == 2
        norm = norm or name == "clip_grads_with_norm_"  # this function is given the norm that the script has computed
        given = [kwargs[key] for key in ("max_norm", "clip_value") if key in kwargs]
        limit = float(given[0] if given else args[0])
        if limit < HUGE:
            before(listed, limit if norm else None)
        return clip(listed, *args, **kwargs)

    for name in CLIPS:
        hooks.attach(nn.utils, name, functools.partial(new_clip, name), nn.utils.clip_grad)


def patch_gathers(hooks: Hooks, before: Callable[[bool], None], names: Iterable[str] = GATHERS) -> None:
    """Calls before(has_gradient) before tensors are gathered from all ranks in a forward pass, by the script itself.

    has_gradient: whether one of them is part of a graph, also in the forward of an autograd function. names: of other
    collectives, which are not gathers.
    """

    def new_gather(gather: Any, *args: Any, **kwargs: Any) -> Any:
        if not in_backward() and not called_by_torch():
            tensors = [leaf for leaf in known_leaves((args, kwargs)) if is_a(leaf, Tensor)]
            has_gradient = any(tensor.grad_fn is not None for tensor in tensors)
            if has_gradient or torch.is_grad_enabled():
                before(has_gradient)
        return gather(*args, **kwargs)

    for name in names:
        hooks.attach(torch.distributed, name, new_gather)


class Reductions:
    """Counts asynchronous reductions whose tensor the script changes before it waits for them. begun: the number of
    reductions of all kinds."""

    def __init__(self) -> None:
        self._going: dict[int, tuple[Any, Tensor, int]] = {}  # id of the handle -> it, its tensor, and its version
        self._changed = self.begun = 0

    def attach(self, hooks: Hooks) -> None:
        """Patches all_reduce, and the wait of its handles."""

        def new_reduce(reduce: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Tensors of torch.inference_mode() have no version.
            version = 0 if tensor.is_inference() else tensor._version
            self.begun += 1
            work = reduce(tensor, *args, **kwargs)
            if work is not None and not tensor.is_inference():
                self._going[id(work)] = work, tensor, version
            return work

        def new_wait(wait: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
            if going := self._going.pop(id(work), None):
                self._changed += going[1]._version != going[2]
            return wait(work, *args, **kwargs)

        hooks.attach(torch.distributed, "all_reduce", new_reduce)
        for name in WAITS:
            hooks.attach(WORK, name, new_wait)

    def unawaited(self) -> int:
        """Returns how many were changed, or not awaited at all, since the last call."""
        count, self._changed = self._changed + len(self._going), 0
        self._going.clear()
        return count


def patch_scaler(hooks: Hooks, before: Callable[[float], None]) -> None:
    """Calls before(factor) before a gradient scaler divides the gradients by its factor."""

    def new_unscale(unscale: Any, self: Any, optimizer: Optimizer) -> None:
        if self.is_enabled():
            before(float(self.get_scale()))
        unscale(self, optimizer)

    hooks.attach(torch.amp.GradScaler, "unscale_", new_unscale)


def patch_autocast(hooks: Hooks, before: Callable[[torch.dtype], None]) -> None:
    """Calls before(dtype) where autocast begins to compute in a coarser dtype."""

    def new_enter(enter: Any, self: Any) -> Any:
        if self._enabled:
            before(self.fast_dtype)
        return enter(self)

    hooks.attach(torch.autocast, "__enter__", new_enter)


def patch_zero_grad(hooks: Hooks, before: Callable[[], None]) -> None:
    """Calls before() before gradients are set to zero or removed."""

    def new_zero_grad(zero_grad: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        before()
        zero_grad(self, *args, **kwargs)

    for owner in (Optimizer, nn.Module):
        hooks.attach(owner, "zero_grad", new_zero_grad)


def patch_schedulers(hooks: Hooks, made: Callable[[LRScheduler], None]) -> None:
    """Calls made(schedule) for each schedule of learning rates that is made."""

    def new_init(init: Any, self: LRScheduler, /, *args: Any, **kwargs: Any) -> None:
        made(self)
        init(self, *args, **kwargs)

    hooks.attach(LRScheduler, "__init__", new_init)


def optimizer_of(scheduler: LRScheduler) -> Any:
    """Returns a scheduler's optimizer, without the wrapper of a library."""
    optimizer = attribute_of(scheduler, "optimizer")
    return attribute_of(optimizer, "optimizer", optimizer)


def length_of(scheduler: LRScheduler) -> int | None:
    """Returns how often a schedule is to be advanced; None where it has no end, or that is not known."""
    function = next(iter(attribute_of(scheduler, "lr_lambdas", ())), None)
    named = attribute_of(function, "keywords", {}).get("num_training_steps")  # the form of transformers' schedules
    lengths = [attribute_of(scheduler, name) for name in ("T_max", "total_steps")]
    return next((int(length) for length in (*lengths, named) if is_a(length, int | float)), None)


class Saves:
    """The files that this process writes with torch.save, from `attach` on."""

    def __init__(self) -> None:
        self._step_of: dict[str, int] = {}  # file -> the number of steps before it was first written

    def attach(self, hooks: Hooks, steps_done: Callable[[], int]) -> None:
        """Records calls of torch.save. steps_done: returns the optimizer steps taken so far."""

        def new_save(save: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if is_a(f, str | os.PathLike):  # a file object has no name
                self._step_of.setdefault(os.path.realpath(os.fspath(f)), steps_done())
            save(obj, f, *args, **kwargs)

        hooks.attach(torch, "save", new_save)

    def records(self) -> list[SaveRecord]:
        """Returns each file once."""
        return [SaveRecord(file, step) for file, step in self._step_of.items()]
