"""Patches functions of torch that have no hook of their own: each calls ours first. And removes them again."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import dataloader
from torch.utils.data.distributed import DistributedSampler

from samestep.job.foreign import attribute_of, is_a, parameters_in, parts_in
from samestep.records.divided_models import SMALL
from samestep.records.script import SaveRecord

WORK: Any = torch.distributed.Work
WAITS = ("wait", "get_future")
GATHERS = ("all_gather", "all_gather_into_tensor")
Around = Callable[[Callable[..., Any], nn.Module, Any, Any], Any]


class Recording:
    """Whether this process's forwards and backward passes are those of the script. is_paused: of what is played."""

    is_paused = False


@contextmanager
def unrecorded() -> Iterator[None]:
    """Runs a block whose forwards and backward passes are not recorded."""
    Recording.is_paused = True
    try:
        yield
    finally:
        Recording.is_paused = False


def patch_forwards(around: Around) -> None:
    """Calls around(call, module, args, kwargs) for each forward of an outermost module, instead of it."""
    call, inside = nn.Module.__call__, threading.local()  # of its own: another patch may lie around this one

    @functools.wraps(call)
    def new_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_inside = getattr(inside, "forward", False) or in_backward() or in_transform()
        if is_inside or Recording.is_paused or torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        inside.forward = True
        try:
            return around(functools.partial(call, self), self, args, kwargs)
        finally:
            inside.forward = False

    nn.Module.__call__ = new_call  # type: ignore[method-assign]


def patch_training_forwards(around: Around) -> None:
    """Calls around(call, module, args, kwargs) for each training forward of an outermost module, instead of it."""

    def training(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if trains(module) and any(parameter.requires_grad for parameter in parameters_in(module)):
            return around(call, module, args, kwargs)
        return call(*args, **kwargs)

    patch_forwards(training)


def is_in_training_mode(module: nn.Module) -> bool:
    """Whether some part of a module is in training mode."""
    return any(attribute_of(part, "training") for part in parts_in(module))


class TrainingMode:
    """Whether a training forward in training mode was seen. Until then the forwards in evaluation mode, with gradients,
    may be those of a training with frozen BatchNorm. A process trains in one of the two."""

    was_seen = False


def trains(module: nn.Module) -> bool:
    """Whether a forward of a module is a training one, and no evaluation."""
    return torch.is_grad_enabled() and (not TrainingMode.was_seen or is_in_training_mode(module))


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() >= 0


def in_transform() -> bool:
    """Whether a transform of torch.func goes on (grad, vmap): its tensors have no storage that could be read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def patch_autograd(before: Callable[[Any], None], after: Callable[[], None]) -> None:
    """Calls before(loss) and after() around each backward()."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def new_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if Recording.is_paused:
            return backward(tensors, *args, **kwargs)
        before(tensors)
        try:
            backward(tensors, *args, **kwargs)
        finally:
            after()

    torch.autograd.backward = new_backward


def make_gradients_small() -> None:
    """Multiplies the gradients of each backward() by a small number."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def new_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        # One inside of another, as of a checkpoint, is given what is small already.
        if in_backward():
            return backward(tensors, grad_tensors, *args, **kwargs)
        roots = [tensors] if is_a(tensors, Tensor) else [*tensors]
        given = [grad_tensors] if grad_tensors is None or is_a(grad_tensors, Tensor) else [*grad_tensors]
        given += [None] * (len(roots) - len(given))
        small = [torch.full_like(r, SMALL) if g is None else g * SMALL for r, g in zip(roots, given)]
        return backward(roots, small, *args, **kwargs)

    torch.autograd.backward = new_backward


CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
HUGE = 1e6  # a limit that no gradient reaches: with it, or an infinite one, a clipping only measures the norm


def patch_clipping(before: Callable[[list[Tensor], float | None], None]) -> None:
    """Calls before(parameters, the greatest norm) before gradients are clipped; not where a norm is only measured."""
    for name in CLIPS:
        _patch_clip(name, before)


def _patch_clip(name: str, before: Callable[[list[Tensor], float | None], None]) -> None:
    clip = getattr(nn.utils, name)

    @functools.wraps(clip)
    def new_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if is_a(parameters, Tensor) else list(parameters)
        norm = name == "clip_grad_norm_" and float(kwargs.get("norm_type", args[1] if len(args) > 1 else 2)) == 2
        norm = norm or name == "clip_grads_with_norm_"  # whose norm the script has computed
        given = [kwargs[key] for key in ("max_norm", "clip_value") if key in kwargs]
        limit = float(given[0] if given else args[0])
        if limit < HUGE:
            before(listed, limit if norm else None)
        return clip(listed, *args, **kwargs)

    for owner in (owner for owner in (nn.utils, nn.utils.clip_grad) if hasattr(owner, name)):
        setattr(owner, name, new_clip)


def patch_gathers(before: Callable[[], None]) -> None:
    """Calls before() before tensors are gathered from all ranks where gradients are recorded."""
    for name in GATHERS:
        _patch_gather(name, before)


def _patch_gather(name: str, before: Callable[[], None]) -> None:
    gather = getattr(torch.distributed, name)

    @functools.wraps(gather)
    def new_gather(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not in_backward():
            before()
        return gather(*args, **kwargs)

    setattr(torch.distributed, name, new_gather)


class Reductions:
    """Reductions that go on beside the script: how often it changes their tensor before it waits for them. begun: how
    many there were, of all kinds."""

    def __init__(self) -> None:
        self._going: dict[int, tuple[Any, Tensor, int]] = {}  # id of the handle -> it, its tensor, and its version
        self._changed = self.begun = 0

    def attach(self) -> None:
        """Patches all_reduce, and the wait of its handles."""
        reduce = torch.distributed.all_reduce

        @functools.wraps(reduce)
        def new_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Those of torch.inference_mode() have no version.
            version = 0 if tensor.is_inference() else tensor._version
            self.begun += 1
            work = reduce(tensor, *args, **kwargs)
            if work is not None and not tensor.is_inference():
                self._going[id(work)] = work, tensor, version
            return work

        torch.distributed.all_reduce = new_reduce
        for name in WAITS:
            self._patch_wait(name)

    def _patch_wait(self, name: str) -> None:
        wait = getattr(WORK, name)

        @functools.wraps(wait)
        def new_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if going := self._going.pop(id(work), None):
                self._changed += going[1]._version != going[2]
            return wait(work, *args, **kwargs)

        setattr(WORK, name, new_wait)

    def unawaited(self) -> int:
        """Returns how many were changed, or not awaited at all, since the last call."""
        count, self._changed = self._changed + len(self._going), 0
        self._going.clear()
        return count


def patch_scaler(before: Callable[[float], None]) -> None:
    """Calls before(factor) before a gradient scaler divides the gradients by its factor."""
    scaler = torch.amp.GradScaler
    unscale = scaler.unscale_

    @functools.wraps(unscale)
    def new_unscale(self: Any, optimizer: Optimizer) -> None:
        if self.is_enabled():
            before(float(self.get_scale()))
        unscale(self, optimizer)

    scaler.unscale_ = new_unscale  # type: ignore[method-assign]


def patch_autocast(before: Callable[[torch.dtype], None]) -> None:
    """Calls before(dtype) where autocast begins to compute in a coarser dtype."""
    enter = torch.autocast.__enter__

    @functools.wraps(enter)
    def new_enter(self: Any) -> Any:
        if self._enabled:
            before(self.fast_dtype)
        return enter(self)  # type: ignore[no-untyped-call]

    torch.autocast.__enter__ = new_enter  # type: ignore[method-assign]


def patch_zero_grad(before: Callable[[], None]) -> None:
    """Calls before() before gradients are set to zero or removed."""
    for owner in (Optimizer, nn.Module):
        _patch_zero_grad(owner, before)


def _patch_zero_grad(owner: Any, before: Callable[[], None]) -> None:
    zero_grad = owner.zero_grad

    @functools.wraps(zero_grad)
    def new_zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        before()
        zero_grad(self, *args, **kwargs)

    owner.zero_grad = new_zero_grad


def patch_schedulers(made: Callable[[LRScheduler], None]) -> None:
    """Calls made(schedule) for each schedule of learning rates that is made."""
    init = LRScheduler.__init__

    @functools.wraps(init)
    def new_init(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        made(self)
        init(self, *args, **kwargs)

    LRScheduler.__init__ = new_init  # type: ignore[method-assign]


def optimizer_of(scheduler: LRScheduler) -> Any:
    """Returns a scheduler's optimizer, without the wrapper of a library."""
    optimizer = attribute_of(scheduler, "optimizer")
    return attribute_of(optimizer, "optimizer", optimizer)


def length_of(scheduler: LRScheduler) -> int | None:
    """Returns how often a schedule is to be advanced; None where it has no end, or that is not known."""
    function = next(iter(attribute_of(scheduler, "lr_lambdas", ())), None)
    named = attribute_of(function, "keywords", {}).get("num_training_steps")  # as transformers' schedules have it
    lengths = [attribute_of(scheduler, name) for name in ("T_max", "total_steps")]
    return next((int(length) for length in (*lengths, named) if is_a(length, int | float)), None)


class Saves:
    """The files that this process writes with torch.save, from `attach` on."""

    def __init__(self) -> None:
        self._step_of: dict[str, int] = {}  # file -> the steps before it was first written

    def attach(self, steps_done: Callable[[], int]) -> None:
        """Records calls of torch.save. steps_done: returns the optimizer steps taken so far."""
        save = torch.save

        @functools.wraps(save)
        def new_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if is_a(f, str | os.PathLike):  # a file object has no name to go by
                self._step_of.setdefault(os.path.realpath(os.fspath(f)), steps_done())
            save(obj, f, *args, **kwargs)

        torch.save = new_save

    def records(self) -> list[SaveRecord]:
        """Returns each file once."""
        return [SaveRecord(file, step) for file, step in self._step_of.items()]


ITERATOR: Any = dataloader._BaseDataLoaderIter
PATCHED: list[tuple[Any, str]] = [
    (nn.Module, "__call__"),
    (nn.Module, "zero_grad"),
    (nn.Module, "__setstate__"),
    (Optimizer, "zero_grad"),
    (torch, "save"),
    (torch.autograd, "backward"),
    (torch.autocast, "__enter__"),
    *((owner, name) for owner in (nn.utils, nn.utils.clip_grad) for name in CLIPS if hasattr(owner, name)),
    *((torch.distributed, name) for name in GATHERS),
    (torch.distributed, "all_reduce"),
    *((WORK, name) for name in WAITS),
    (torch.amp.GradScaler, "unscale_"),
    (LRScheduler, "__init__"),
    (DistributedSampler, "set_epoch"),
    *((ITERATOR, name) for name in ("__init__", "_reset", "_next_index", "__next__")),
]


class Patches:
    """What torch's patched places held before. Make it before the patches, and call installed() after them."""

    def __init__(self, places: Iterable[tuple[Any, str]] = ()) -> None:
        self._places = [*PATCHED, *places]
        self._before = [getattr(owner, name) for owner, name in self._places]
        self._installed: list[Any] = []

    def installed(self) -> None:
        """Notes what the places hold now."""
        self._installed = [getattr(owner, name) for owner, name in self._places]

    def undo(self) -> None:
        """Puts back what was there; a place that another library has patched since stays as it is."""
        for (owner, name), before, patch in zip(self._places, self._before, self._installed):
            if getattr(owner, name) is patch:
                setattr(owner, name, before)


# Modules that a script may import later, or never


def after_import(name: str, then: Callable[[], None]) -> None:
    """Calls a function after a module is imported for the first time; at once, where it is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function after a module is imported for the first time."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def new_execute(module: Any) -> None:
            execute(module)
            self._then()

        spec.loader.exec_module = new_execute
        return spec
