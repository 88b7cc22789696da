"""StepCosts: what one step of a training costs this rank: memory by what holds it, bytes sent by axis, the bubble.

It looks at two steps after the measured ones, which it slows down: in one it takes the time that the stages of a
pipeline compute, in the other it follows each tensor from the operation that makes it until it is freed.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from samestep.rank import hardware
from samestep.rank.parts import Part
from samestep.rank.threaded_group import active_turns
from samestep.rank.traffic import OPERATIONS, Traffic
from samestep.records.costs import PeakMemory, StepCost
from samestep.world import World
from samestep.world.mesh import Mesh

LOOKED_AT = 2  # steps
STAGE = "torch.distributed.pipelining.stage"


class StepCosts(Part):
    """Looks at the steps after `steps`. mesh: of the ranks."""

    def __init__(self, world: World, mesh: Mesh, steps: int) -> None:
        self._world, self._steps = world, steps
        self._traffic = Traffic(mesh)
        self._memory: MemoryMode | None = None
        self._bubble: float | None = None
        self._began = 0.0
        self.cost: StepCost | None = None
        self.peak_memory_bytes = 0  # of the steps before, as of hardware.peak_memory_bytes

    def step_begins(self) -> None:
        """Begins to look at the step, if it is one of those."""
        done = self.training.count.done
        if done == self._steps:
            # Measured before the inspection itself needs more.
            self.peak_memory_bytes = hardware.peak_memory_bytes(self._world.device)
            _computing.seconds = 0.0
            _time_stages(self._world.device)
            self._began = time.perf_counter()
        elif done == self._steps + 1 and not _has_compiled():
            model, optimizer = self.training.model, self.training.optimizer
            with suppress(Exception):  # a property of the job's optimizer: reading it must not end a training
                self._memory = MemoryMode(model, optimizer, self._world.device, self._traffic)
                self._traffic.begin()
                self._memory.__enter__()  # type: ignore[no-untyped-call]

    def stepped(self) -> None:
        """Takes what was seen of the step."""
        if self.training.count.done == self._steps:
            hardware.synchronize(self._world.device)
            seconds, computing = time.perf_counter() - self._began, getattr(_computing, "seconds", None)
            _computing.seconds = None
            self._bubble = 1 - computing / seconds if computing and active_turns() is None else None
        elif self._memory is not None:
            self._memory.__exit__(None, None, None)
            self._traffic.end()
            if not self._memory.failed:
                self.cost = StepCost(self._memory.peak, dict(self._traffic.sent), self._bubble)
            self._memory = None


def _has_compiled() -> bool:
    """Returns whether torch.compile has compiled anything: the step would be followed as it is without."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return bool(utils and utils.counters["stats"]["unique_graphs"])


_computing = threading.local()  # .seconds: that the stages of this rank have computed in a step; None: none is timed


def _time_stages(device: str) -> None:
    """Makes torch's pipeline stages add the seconds of their passes to those of their rank."""
    if STAGE not in sys.modules:
        return
    stage: Any = sys.modules[STAGE]
    kind = stage._PipelineStageBase
    if hasattr(kind, "samestep_timed"):
        return
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        setattr(kind, name, _timed(getattr(kind, name), device))
    kind.samestep_timed = True


def _timed(method: Callable[..., Any], device: str) -> Callable[..., Any]:
    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if getattr(_computing, "seconds", None) is None:
            return method(*args, **kwargs)
        began = time.perf_counter()
        result = method(*args, **kwargs)
        hardware.synchronize(device)
        _computing.seconds += time.perf_counter() - began
        return result

    return timed


class MemoryMode(TorchDispatchMode):
    """Follows the tensors of a step on a device. peak: what held the most bytes that there were at once.

    A tensor counts while its storage lives, with the size that this has: FSDP empties storages that it keeps. One that
    was there before counts once it is written to, as a bucket of gradients, or sent; what is only read, as the rows of
    which a batch is made, is not the step's. failed: whether an operation could not be followed.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: str, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._optimizer, self._traffic = model, optimizer, traffic
        self._device = torch.device(device).type
        self.failed = False
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # number -> storage, and its bytes
        self._numbers: dict[int, int] = {}  # the address of a storage's object -> its number
        self._read_only: set[int] = set()  # numbers of storages from before the step
        self._next = self._total = self._largest = 0
        self._at_peak: dict[int, int] = {}
        self._kinds: dict[int, str] = {}
        self._held: Counter[str] = Counter()  # kind -> bytes, at most
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._note("gradients", self._gradients()))
        self._note("parameters", [*model.parameters(), *model.buffers()])
        self._note("optimizer", self._state())
        self._note("gradients", self._gradients())
        self._take_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # of a DTensor's, for the operation on this rank's part, which comes here, too
        kwargs = kwargs or {}
        try:
            if active_turns() is None:
                self._traffic.count_operation(func, args)
            for tensor in _tensors((args, kwargs)):
                self._follow(tensor, read_only=True)
        except Exception:
            self.failed = True
        result = func(*args, **kwargs)
        try:
            for tensor in _tensors(_written(func, args, kwargs)):
                self._read_only -= {*self._follow(tensor)}
                self._follow(tensor)
            for tensor in _tensors(result):
                self._follow(tensor)
            if self._total > self._largest:
                self._take_peak()
        except Exception:
            self.failed = True
        return result

    def __exit__(self, *args: Any) -> None:
        self._hook.remove()
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._note("optimizer", self._state())

    @property
    def peak(self) -> PeakMemory:
        return PeakMemory(
            parameters=self._held["parameters"],
            gradients=self._held["gradients"],
            optimizer=self._held["optimizer"],
            others=sum(size for number, size in self._at_peak.items() if number not in self._kinds),
            total=self._largest,
        )

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]

    def _state(self) -> list[Tensor]:
        # ZeroRedundancyOptimizer keeps that of this rank's part in an optimizer of its own.
        state = getattr(self._optimizer, "optim", self._optimizer).state
        return _tensors([*state.values()])

    def _note(self, kind: str, tensors: list[Tensor]) -> None:
        numbers = {number for tensor in tensors for number in self._follow(tensor)}
        numbers = {number for number in numbers if self._kinds.setdefault(number, kind) == kind}
        self._held[kind] = max(self._held[kind], sum(self._live[number][1] for number in numbers))

    def _follow(self, tensor: Tensor, *, read_only: bool = False) -> list[int]:
        """Returns the numbers of a tensor's storages on the device, and takes in their sizes. read_only: those that
        nobody has seen were there before."""
        if tensor.device.type != self._device:
            return []
        return [self._number(storage, read_only) for storage in _storages(tensor)]

    def _number(self, storage: torch.UntypedStorage, read_only: bool) -> int:
        number = self._numbers.get(id(storage), -1)
        if number not in self._live or self._live[number][0]() is not storage:
            number, self._next = self._next, self._next + 1
            self._numbers[id(storage)] = number
            self._live[number] = (weakref.ref(storage, lambda _: self._forget(number)), 0)
            if read_only:
                self._read_only.add(number)
        if number not in self._read_only:
            self._resize(number, storage)
        return number

    def _resize(self, number: int, storage: torch.UntypedStorage) -> None:
        reference, before = self._live[number]
        self._live[number] = (reference, storage.nbytes())
        self._total += storage.nbytes() - before

    def _forget(self, number: int) -> None:
        _, size = self._live.pop(number)
        self._total -= size

    def _take_peak(self) -> None:
        """Keeps what there is, where it is more than ever before. Looks again at each size: nobody says when FSDP
        empties a storage."""
        for number, (reference, _) in [*self._live.items()]:
            storage = reference()
            if storage is not None and number not in self._read_only:
                self._resize(number, storage)
        if self._total > self._largest:
            self._largest = self._total
            self._at_peak = {number: size for number, (_, size) in self._live.items()}


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that an operation writes to; all of a collective's, which does not say."""
    if operation._schema.name in OPERATIONS:
        return [*args]
    written = []
    for place, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Returns the storages of a tensor; of a tensor of others, as a DTensor, theirs."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return [storage for part in parts if isinstance(part, Tensor) for storage in _storages(part)]
    if tensor.is_meta:  # has no values: of another stage, or of another rank's parameters
        return []
    with suppress(NotImplementedError, RuntimeError):  # a tensor without a storage
        return [tensor.untyped_storage()]
    return []
