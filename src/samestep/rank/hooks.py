"""Attaches functions that observe a training to attributes of torch, and detaches them again.

A replacement is called as replacement(original, *arguments), in place of the function that it stands for. With a guard,
what the replacement raises of itself ends the observation, and the training gets what torch's own function returns;
what the original raises is the training's, and passes.

Detached, a place holds again the very object that it held. Where another library has replaced the function since, its
replacement stays, and ours, which it calls, calls the original and nothing else.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import BuiltinFunctionType, FrameType, ModuleType
from typing import Any, Protocol

import torch
from torch.jit import _builtins

from samestep.errors import SamestepError
from samestep.job.foreign import is_a

OBSERVERS = (
    __name__,
    "samestep.recorder.",
    "samestep.as_cpu.",
)  # whose frames lie between a training and a replacement
READ_ONCE = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")  # whose parameters may be an iterator
ABSENT = object()  # what a place holds that inherits its attribute


class Guarding(Protocol):
    """Keeps samestep's exceptions out of a training. fault: the exception that has ended the observation."""

    fault: Exception | None

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]: ...

    def end(self, fault: Exception) -> None: ...


class Call:
    """The original function, during one call of its replacement. error, result: of its own call."""

    __slots__ = ("_function", "error", "is_done", "result")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.error: BaseException | None = None
        self.is_done, self.result = False, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not by run(): a recursive module's depth is limited by the frames of each call.
        try:
            result = self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        if not self.is_done:
            self.is_done, self.result = True, result
        return result

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of the script's in the place of the original: what it raises is the script's."""
        self._function = function
        return self(*args, **kwargs)


def call_guarded(
    guard: Guarding, replacement: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Calls replacement(function, *args, **kwargs), and gives what the function gives where the replacement fails."""
    call = Call(function)
    try:
        return replacement(call, *args, **kwargs)
    except Exception as error:
        if error is call.error or is_a(error, SamestepError):
            call.error = None  # otherwise the exception and this frame would keep each other, with all their tensors
            raise
        guard.end(error)
    if call.error is not None:
        raised, call.error = call.error, None
        raise raised
    return call.result if call.is_done else function(*args, **kwargs)


class Hooks:
    """Replacements of attributes that are attached and detached together. guard: None lets pass what they raise."""

    def __init__(self, guard: Guarding | None = None) -> None:
        self._guard, self._is_detached = guard, False
        self._places: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it held itself, and what it holds now
        self._finders: list[AfterImport] = []
        self._scripted: list[Any] = []  # what stands for a function that torch.jit.script knows

    def attach(self, owner: Any, name: str, replacement: Callable[..., Any], *aliases: Any) -> None:
        """Replaces a function of a module, a method of a class, or a method of one object, where there is one.

        aliases: other owners where torch looks for the same function: they hold the same object again.
        """
        attached = dict[int, Any]()
        for place in (owner, *aliases):
            if self._is_detached or not hasattr(place, name):
                continue
            function, held = getattr(place, name), inspect.getattr_static(place, name, None)
            if id(function) not in attached:
                attached[id(function)] = self._hook(function, replacement, is_read_once=name in READ_ONCE)
                if isinstance(place, ModuleType):
                    self._stand_in(place, name, function, attached[id(function)])
            hook = attached[id(function)]
            if isinstance(place, type) and isinstance(held, staticmethod):
                hook = staticmethod(hook)
            self._places.append((place, name, vars(place).get(name, ABSENT), hook))
            setattr(place, name, hook)

    def after_import(self, module: str, callback: Callable[[], None]) -> None:
        """Calls a function after a module is imported for the first time; at once, where it is."""
        if module in sys.modules:
            callback()
            return
        self._finders.append(AfterImport(module, self._guard.hook(callback) if self._guard else callback))
        sys.meta_path.insert(0, self._finders[-1])

    def attach_after_import(self, module: str, owner: str, name: str, replacement: Callable[..., Any]) -> None:
        """Replaces a method of a class once its module is imported, where this version of the module has it."""
        self.after_import(module, lambda: self.attach(getattr(sys.modules[module], owner, None), name, replacement))

    def detach(self) -> None:
        """Puts the original attributes back."""
        self._is_detached = True
        for owner, name, before, hook in reversed(self._places):
            if vars(owner).get(name) is not hook:
                continue
            if before is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        for finder in self._finders:
            finder.remove()
        for hook in self._scripted:
            _builtins._get_builtin_table().pop(id(hook), None)
        self._places, self._finders, self._scripted = [], [], []

    def _stand_in(self, module: ModuleType, name: str, function: Any, hook: Any) -> None:
        """Lets pickle and torch.jit.script take a hook for a function that is written in C, which they know by name."""
        if isinstance(function, BuiltinFunctionType):
            hook.__module__, hook.__qualname__ = module.__name__, name
        if operator := _builtins._find_builtin(function):
            _builtins._register_builtin(hook, operator)
            self._scripted.append(hook)

    def _hook(self, function: Any, replacement: Callable[..., Any], *, is_read_once: bool) -> Callable[..., Any]:
        guard = self._guard

        @functools.wraps(function)
        def hook(*args: Any, **kwargs: Any) -> Any:
            if self._is_detached:
                return function(*args, **kwargs)
            if torch.compiler.is_compiling():
                return replacement(function, *args, **kwargs)
            if guard is None:
                return replacement(Call(function), *args, **kwargs)
            if guard.fault is not None:
                return function(*args, **kwargs)
            if is_read_once:
                args = tuple([*value] if is_a(value, Iterator) else value for value in args)
                kwargs = {name: [*value] if is_a(value, Iterator) else value for name, value in kwargs.items()}
            return call_guarded(guard, replacement, function, *args, **kwargs)

        return hook


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function after a module is imported for the first time."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name, self._callback = name, callback

    def remove(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        self.remove()
        spec: Any = importlib.util.find_spec(name)
        # What is not installed has no spec, and a folder without __init__.py executes nothing.
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if execute is None:
            return spec

        def new_execute(module: Any) -> None:
            execute(module)
            self._callback()

        spec.loader.exec_module = new_execute
        return spec


def calling_frame() -> FrameType:
    """Returns the frame that calls a replaced function: asked by its replacement."""
    frame = sys._getframe(2)
    while frame.f_back and str(frame.f_globals.get("__name__", "")).startswith(OBSERVERS):
        frame = frame.f_back
    return frame


def called_by_torch() -> bool:
    """Returns whether torch itself calls the patched function that asks, and counts the ranks that there are. Its
    collectives with a gradient call the others as a script does."""
    caller = str(calling_frame().f_globals.get("__name__", ""))
    return caller.partition(".")[0] == "torch" and caller != "torch.distributed.nn.functional"
