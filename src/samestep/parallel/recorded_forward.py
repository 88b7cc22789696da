"""A recorded forward pass: which modules it calls, in which order, and which parameters and buffers are read where.

What every plan of how ranks divide a model knows of the model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from samestep.job.walk import flattened, leaves_of
from samestep.parallel.plan_trial import without_compiling
from samestep.rank.step import default_generator


@dataclass(eq=False)
class Call:
    """One call of a module."""

    name: str
    """The name of the module."""

    module: nn.Module
    """The module."""

    random: Tensor
    """The generator's state before the call."""

    arguments: list[Any] = field(default_factory=list)
    """The leaves of what the module's forward is given."""

    rebuilt: Callable[[Iterable[Any]], Any] = tuple
    """Rebuilds the positional and the named arguments from their leaves."""

    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Returns a context that is in autocast as the call is."""

    output: list[Any] = field(default_factory=list)
    """The leaves of what the module's forward returns."""

    version: int = 0
    """How often the first leaf of the output had been changed in place at the end of the call."""

    random_after: Tensor | None = None
    """The generator's state after the call. None: the call has not ended."""

    noted: list[Any] = field(default_factory=list)
    """What the trial has noted during the call."""

    inner: list[Call] = field(default_factory=list)
    """The calls directly inside this one."""

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn inside."""
        return self.random_after is None or not torch.equal(self.random, self.random_after)


@dataclass(frozen=True)
class Read:
    """An operation that takes a parameter or a buffer. tensor: its name. inside: the calls that have begun and not
    ended, the innermost last."""

    tensor: str
    operation: Any
    inside: tuple[Call, ...]


class RecordedForward(TorchFunctionMode):
    """Records the forward pass that is computed while it is entered.

    modules: whose calls, and whose own parameters and buffers, are recorded; by name. copies: whether arguments and
    outputs are copied, as code may change them in place afterwards; those of calls in which nothing was noted are not
    kept. began: called with each call that begins. events: calls, where they begin, and reads, in their order.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        device: str,
        *,
        copies: bool = False,
        began: Callable[[Call], None] = lambda call: None,
    ) -> None:
        super().__init__()
        self.events: list[Call | Read] = []
        self._modules, self._device, self._copies, self._began = modules, device, copies, began
        self._generator, self._open, self._hooks = default_generator(device), list[Call](), ExitStack()
        self._names: dict[int, str] = {}
        for name, module in modules.items():
            for tensor_name, tensor in tensors_of(module, recurse=False):
                self._names.setdefault(id(tensor), f"{name}.{tensor_name}".lstrip("."))

    @property
    def calls(self) -> list[Call]:
        """The calls, in the order in which they began."""
        return [event for event in self.events if isinstance(event, Call)]

    @property
    def outermost(self) -> list[Call]:
        """The calls that are inside of no other."""
        inner = {call for outer in self.calls for call in outer.inner}
        return [call for call in self.calls if call not in inner]

    @property
    def reads(self) -> list[Read]:
        """The reads, in their order."""
        return [event for event in self.events if isinstance(event, Read)]

    def note(self, value: Any) -> None:
        """Notes a value in the calls that have begun and not ended."""
        for call in self._open:
            call.noted.append(value)

    def __enter__(self) -> RecordedForward:
        self.events.clear()
        self._open.clear()
        for name, module in self._modules.items():
            # Before the module's own hooks, which may read parameters.
            begin = module.register_forward_pre_hook(partial(self._begin, name), prepend=True)
            take = module.register_forward_pre_hook(self._take_arguments, with_kwargs=True)
            end = module.register_forward_hook(self._end, always_call=True)
            for hook in (begin, take, end):
                self._hooks.callback(hook.remove)
        self._hooks.enter_context(without_compiling())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (name := self._names.get(id(leaf))):
                self.events.append(Read(name, func, tuple(self._open)))
        return func(*args, **(kwargs or {}))

    def _begin(self, name: str, module: nn.Module, arguments: Any) -> None:
        call = Call(name, module, self._generator.get_state())
        if self._open:
            self._open[-1].inner.append(call)
        self._open.append(call)
        self.events.append(call)
        self._began(call)

    def _take_arguments(self, module: nn.Module, arguments: Any, named: Any) -> None:
        call = self._open[-1]
        leaves, call.rebuilt = flattened((arguments, named))
        call.arguments = self._kept(leaves)
        call.random, call.autocast = self._generator.get_state(), _autocast_of(self._device)

    def _end(self, module: nn.Module, arguments: Any, output: Any) -> None:
        call = self._open.pop()
        call.random_after = self._generator.get_state()
        if self._copies and not call.noted:
            call.arguments = []
            return
        call.output = self._kept(leaves_of(output))
        call.version = next((leaf._version for leaf in call.output if isinstance(leaf, Tensor)), 0)

    def _kept(self, leaves: list[Any]) -> list[Any]:
        return copies_of(leaves) if self._copies else leaves


def copies_of(leaves: Sequence[Any]) -> list[Any]:
    """Returns leaves with copies of the tensors among them."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def tensors_of(model: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers by name; tied ones once."""
    yield from model.named_parameters(recurse=recurse)
    yield from model.named_buffers(recurse=recurse)


def _autocast_of(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Returns a function that returns a context in autocast, or not, as it is now."""
    kind = device.partition(":")[0]
    enabled = torch.is_autocast_enabled(kind)
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind), enabled=enabled) if enabled else nullcontext
