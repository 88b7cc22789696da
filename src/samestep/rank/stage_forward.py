"""A stage of a pipeline: the part of a model's own forward pass between two of its modules.

The model's code runs as it is written, on the rows that every rank of the replica has. What depends on parameters of
other stages is absent: a tensor on the device `meta`, which has a shape and no values, as has all that is computed from
it. So masks and positions are computed where they are needed, and the first module of a stage gets what the stage
before has sent in the place of what is absent. Where the next stage begins, the forward pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

META = torch.device("meta")
DEVICE_OF: Any = Tensor.device.__get__


class AbsentTensors(TorchFunctionMode):
    """Lets operations on absent tensors return absent tensors, whatever other tensors they take.

    Code that asks for an absent tensor's device, to make another tensor there, gets `device`. After begin_stage(),
    operations take the tensors that were received for absent ones.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self._begun = torch.device(device), False
        self._received: dict[int, tuple[Tensor, Tensor]] = {}  # the id of an absent tensor -> it, what was received

    def begin_stage(self, received: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Ends what is absent. received: (an absent tensor, the one that was received for it)."""
        self._begun = True
        self._received = {id(absent): (absent, tensor) for absent, tensor in received}

    def present(self, leaf: Any) -> Any:
        """Returns what was received for an absent tensor, and anything else as it is."""
        return self._received[id(leaf)][1] if id(leaf) in self._received else leaf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return func(*args, **kwargs)
        if func == DEVICE_OF:
            return self.device
        instead = self.present if self._begun else _absent
        args, kwargs = tree_unflatten([instead(leaf) for leaf in leaves], structure)
        return func(*args, **kwargs)


def _absent(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf if leaf.is_meta else leaf.to(META)
    return META if isinstance(leaf, torch.device) else leaf


class StageOutput(BaseException):
    """Ends a forward pass where the next stage begins. leaves: what its first module is called with."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.leaves = leaves


class StageForward:
    """The forward pass of one stage.

    begins, ends: the modules with which this stage and the next one begin; None: there is no stage before, or after.
    received: which of the leaves that `begins` is called with come from the stage before; None: all that are absent,
    which are noted here.
    """

    def __init__(
        self, begins: nn.Module | None, ends: nn.Module | None, device: str, received: Sequence[int] | None = None
    ) -> None:
        self.begins, self.ends, self.device, self.received = begins, ends, device, received

    def run(self, forward: Callable[[], Any], receive: Callable[[dict[int, Tensor]], dict[int, Tensor]]) -> Any:
        """Calls `forward`, which calls the model. Returns what it returns; raises StageOutput where the stage ends.

        receive(absent): returns the received tensors, for leaves that have these shapes; by the leaves' numbers.
        """
        absent = AbsentTensors(self.device)

        def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
            leaves, structure = tree_flatten((args, kwargs))
            if self.received is None:
                self.received = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_meta]
            received = receive({number: leaves[number] for number in self.received})
            absent.begin_stage([(leaves[number], tensor) for number, tensor in received.items()])
            return tree_unflatten([received.get(number, leaf) for number, leaf in enumerate(leaves)], structure)

        def end(module: nn.Module, args: Any, kwargs: Any) -> None:
            raise StageOutput([absent.present(leaf) for leaf in tree_flatten((args, kwargs))[0]])

        with ExitStack() as stack:
            if self.begins is not None:
                stack.callback(self.begins.register_forward_pre_hook(begin, with_kwargs=True).remove)
                stack.enter_context(absent)
            if self.ends is not None:
                stack.callback(self.ends.register_forward_pre_hook(end, with_kwargs=True).remove)
            return forward()


def sizes_at(
    forward: Callable[[], Any], model: nn.Module, begins: Sequence[nn.Module], device: str
) -> list[list[tuple[torch.Size, torch.dtype] | None]]:
    """Returns the shape and dtype of each leaf that the first modules of stages are called with; None: not a tensor.

    Computes no values: all parameters are absent meanwhile.
    """
    sizes: list[list[tuple[torch.Size, torch.dtype] | None]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_flatten((args, kwargs))[0]
        sizes.append([(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves])
        if module is begins[-1]:
            raise StageOutput(leaves)

    with ExitStack() as stack:
        for module in begins:
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        stack.enter_context(without(absent_tensors(model, lambda tensor: False)))
        stack.enter_context(AbsentTensors(device))
        stack.enter_context(torch.no_grad())
        with suppress(StageOutput):
            forward()
    return sizes


Absent = tuple[dict[str, Any], str, Tensor]  # a module's tensors, the name of one, and what stands for it


def absent_tensors(model: nn.Module, keeps: Callable[[Tensor], bool]) -> list[Absent]:
    """Returns absent tensors for a model's parameters and buffers that `keeps` does not keep; tied ones stay tied."""
    of_tensor: dict[int, Tensor] = {}
    absent: list[Absent] = []
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta or keeps(tensor):
                    continue
                if id(tensor) not in of_tensor:
                    like: Tensor = tensor.detach().to(META)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    of_tensor[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
                absent.append((tensors, name, of_tensor[id(tensor)]))
    return absent


def leave_absent(model: nn.Module, keeps: Callable[[Tensor], bool]) -> None:
    """Puts absent tensors in the places of a model's parameters and buffers that `keeps` does not keep."""
    for tensors, name, tensor in absent_tensors(model, keeps):
        tensors[name] = tensor


@contextmanager
def without(absent: Sequence[Absent]) -> Iterator[None]:
    """Puts absent tensors in their places in a model while the block runs."""
    before = [(tensors, name, tensors[name]) for tensors, name, _ in absent]
    for tensors, name, tensor in absent:
        tensors[name] = tensor
    try:
        yield
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor
