"""Records the lines of the user's code that call torch: the file and line of the `backward()`, the loader, the
wrapper."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from samestep.job.foreign import ById, attributes_of, defines, is_a, named_parts_in
from samestep.rank.hooks import Hooks, called_by_torch
from samestep.recorder.group_operations import members
from samestep.recorder.parameters import WRAPPERS, plain
from samestep.recorder.patches import CLIPS
from samestep.records.call_site import Call, CallRecord, CallSite
from samestep.records.torch_collectives import COLLECTIVES
from samestep.world.imports import INSTALLED, is_users_code

TORCH_AND_THIS = tuple(
    os.path.join(os.path.realpath(Path(file).parent), "") for file in (torch.__file__, Path(__file__).parent)
)
DEEPEST = 200  # frames that are looked at
CALLERS = 4  # lines of the user's code that are recorded of one call
MAKE = "__init__"
PLACES: list[tuple[Any, str, Call]] = [
    (DataLoader, MAKE, "loader"),
    (DataLoader, "__iter__", "iteration"),
    (DistributedSampler, MAKE, "sampler"),
    (DistributedSampler, "set_epoch", "set_epoch"),
    (nn.Module, MAKE, "model"),
    (nn.parallel.DistributedDataParallel, MAKE, "wrapper"),
    (nn.parallel.DataParallel, MAKE, "wrapper"),
    (Optimizer, MAKE, "optimizer"),
    (Optimizer, "zero_grad", "zero_grad"),
    (nn.Module, "zero_grad", "zero_grad"),
    (LRScheduler, MAKE, "scheduler"),
    *((owner, "step", "scheduler step") for owner in (LRScheduler, ReduceLROnPlateau, SequentialLR)),
    (torch.autograd, "backward", "backward"),
    *((nn.utils, name, "clip") for name in CLIPS),
    (torch, "save", "save"),
    (torch, "manual_seed", "seed"),
    *((dist, function.name, "collective") for function in COLLECTIVES),
]
# Functions whose first argument is the object that is noted.
METHODS = ("iteration", "set_epoch", "zero_grad", "scheduler step")
Chain = tuple[tuple[str, int, str], ...]  # file, line and function of the innermost line, then those of its callers


@dataclass
class Line:
    """A line that is calling torch. target: the loader, optimizer or scheduler that it makes or calls."""

    chain: Chain
    target: object
    first: int
    last: int
    count: int = 1


class CallSites:
    """Records the lines of the user's code that call torch, from `attach` on; each once.

    package: the folder of the script: its files are the user's wherever they lie. steps_done: returns the optimizer
    steps taken so far.
    """

    def __init__(self, package: str, steps_done: Callable[[], int]) -> None:
        self._package = os.path.join(os.path.realpath(package), "") if package else ""
        self._steps_done = steps_done
        self._lines: dict[tuple[Call, str, int, Chain], Line] = {}
        self._made = ById[Chain]()
        self._is_users: dict[str, bool] = {}
        self._inside = threading.local()  # frames of a constructor, whose calls are in no line of the user's

    def attach(self, hooks: Hooks) -> None:
        """Patches torch's functions and methods: each notes from where it is called."""
        for owner, name, call in PLACES:
            replacement = functools.partial(self._construct, call) if name == MAKE else self._calling(call, name)
            hooks.attach(owner, name, replacement, *([nn.utils.clip_grad] if call == "clip" else ()))

    def note(self, call: Call, name: str = "", target: object = None) -> None:
        """Notes a call from the innermost line of the user's code in this thread's stack."""
        if chain := self.chain():
            self._add(call, name, chain, target)

    def made_at(self, thing: object) -> Chain:
        """Returns the user's lines that have made a loader, an optimizer or a model; none where they are not known."""
        return self._made.get(thing, ())

    def note_model(self, module: nn.Module) -> None:
        """Notes the line that has made a model, and those of its parts with parameters that were made elsewhere."""
        known = set[Chain]()
        for name, part in named_parts_in(module):
            if plain(name) or not any(defines(part, wrapper) for wrapper in WRAPPERS):
                chain = self._made.get(part, ())
                if chain and chain not in known and (attributes_of(part)["_parameters"] or not known):
                    self._add("model", plain(name), chain, None)
                known.add(chain)

    def records(self, numbers: Mapping[int, int]) -> list[CallRecord]:
        """Returns the lines. numbers: id of a loader, an optimizer or a scheduler -> its number."""
        return [
            CallRecord(
                call=call,
                name=name,
                sites=[CallSite(os.path.abspath(file), line, function) for file, line, function in chain],
                number=numbers.get(target, -1),
                first=calls.first,
                last=calls.last,
                count=calls.count,
            )
            for (call, name, target, chain), calls in self._lines.items()
        ]

    def release(self) -> None:
        """Lets go of what was called: the training frees it when it will."""
        self._lines, self._made = {}, ById()

    def _calling(self, call: Call, name: str) -> Callable[..., Any]:
        is_method = call in METHODS

        def new_function(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            is_noted = not torch.compiler.is_compiling() and not getattr(self._inside, "constructor", False)
            if is_noted and call == "collective":
                # A group of one rank exchanges nothing. FSDP gathers in forwards that the user calls.
                is_alone = dist.is_initialized() and len(members(args, kwargs)) == 1
                is_noted = not is_alone and not called_by_torch()
            if is_noted:
                self.note(call, "" if is_method else name, args[0] if is_method else None)
            return function(*args, **kwargs)

        return new_function

    def _construct(self, call: Call, init: Any, made: Any, /, *args: Any, **kwargs: Any) -> None:
        chain = self.chain(is_model=call == "model")
        self._made.put(made, chain)
        if call == "model":
            init(made, *args, **kwargs)
            return
        outer, self._inside.constructor = getattr(self._inside, "constructor", False), True
        try:
            init(made, *args, **kwargs)
        finally:
            self._inside.constructor = outer
            if chain and not outer:
                self._add(call, type(made).__name__, chain, made)

    def _add(self, call: Call, name: str, chain: Chain, target: object) -> None:
        done = self._steps_done()
        line = self._lines.setdefault((call, name, id(target), chain), Line(chain, target, done, done, 0))
        line.last = done
        line.count += 1

    def chain(self, *, is_model: bool = False) -> Chain:
        """Returns the user's lines in this thread's stack. is_model: without the constructors of the model's parts."""
        chain: list[tuple[str, int, str]] = []
        frame: FrameType | None = sys._getframe(2)
        for _ in range(DEEPEST):
            if frame is None or len(chain) == CALLERS:
                break
            code = frame.f_code
            if self.is_users(code.co_filename) and not (is_model and _makes_module(frame)):
                chain.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return tuple(chain)

    def is_users(self, file: str) -> bool:
        """Returns whether a file is the user's own code."""
        known = self._is_users.get(file)
        if known is None:
            path = os.path.realpath(file)
            inside = bool(self._package) and path.startswith(self._package)
            # A virtual environment may lie in the script's folder, and the script in one.
            users = not INSTALLED.search(os.sep + path.removeprefix(self._package)) if inside else is_users_code(file)
            # '<string>' and '<frozen runpy>' are no files.
            known = self._is_users[file] = users and not path.startswith(TORCH_AND_THIS) and not file.startswith("<")
        return known


def _makes_module(frame: FrameType) -> bool:
    """Returns whether a frame is the constructor of a module."""
    code = frame.f_code
    return code.co_name == MAKE and is_a(frame.f_locals.get(code.co_varnames[0]), nn.Module)
