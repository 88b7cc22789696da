"""A stage of a pipeline: the part of a model's own forward pass between two of its modules.

The model's code runs as it is written, on the rows that every rank of the replica has. What depends on parameters of
other stages is absent: a tensor on the device `meta`, which has a shape and no values, as has all that is computed from
it. So masks and positions are computed where they are needed, and the first module of a stage gets what the stage
before has sent in the place of what is absent. Where the next stage begins, the forward pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from samestep.errors import Refused
from samestep.message import message
from samestep.rank.absent_modules import META, AbsentModules, Outputs
from samestep.rank.shards import is_shard
from samestep.world.foreign_code import error_line

DEVICE_OF: Any = Tensor.device.__get__
VALUES = (bool, int, float, str, type(None), torch.dtype, torch.Size)  # arguments that have no tensors in them


class AbsentTensors(TorchFunctionMode):
    """Lets operations on absent tensors return absent tensors, whatever other tensors they take.

    Code that asks for an absent tensor's device, to make another tensor there, gets `device`. After begin_stage(),
    operations take the tensors that were received for absent ones.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.begun = torch.device(device), False
        self._received: dict[int, tuple[Tensor, Tensor]] = {}  # the id of an absent tensor -> it, what was received

    def begin_stage(self, received: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Ends what is absent. received: (an absent tensor, the one that was received for it)."""
        self.begun = True
        self._received = {id(absent): (absent, tensor) for absent, tensor in received}

    def present(self, leaf: Any) -> Any:
        """Returns what was received for an absent tensor, and anything else as it is."""
        return self._received[id(leaf)][1] if id(leaf) in self._received else leaf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _are_present(args) and _are_present(kwargs.values()):
            return func(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return func(*args, **kwargs)
        if func == DEVICE_OF:
            return self.device
        instead = self.present if self.begun else _absent
        args, kwargs = tree_unflatten([instead(leaf) for leaf in leaves], structure)
        return func(*args, **kwargs)


def _are_present(values: Iterable[Any]) -> bool:
    """Returns whether none of an operation's arguments is, or has in it, an absent tensor; False where only flattening
    them can tell, which takes as long as a small operation."""
    return all(
        not value.is_meta
        if isinstance(value, Tensor)
        else isinstance(value, VALUES) or (type(value) in (list, tuple) and _are_present(value))
        for value in values
    )


def _absent(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf if leaf.is_meta else absent_of_whole(leaf)
    return META if isinstance(leaf, torch.device) else leaf


def absent_of_whole(tensor: Tensor) -> Tensor:
    """Returns an absent tensor like another one; of a shard, like the whole."""
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device=META) if is_shard(tensor) else tensor
    return like.to(META)


class StageOutput(BaseException):
    """Ends a forward pass where the next stage begins. leaves: what its first module is called with."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.leaves = leaves


class StageForward:
    """The forward pass of one stage.

    number: the stage's. begins, ends: the names of the modules with which this stage and the next one begin; None:
    there is no stage before, or after. received: which of the leaves that `begins` is called with come from the stage
    before; None: all that are absent, which are noted here. outputs: what modules of stages before have returned, in
    other passes of the same model.
    """

    def __init__(
        self,
        model: nn.Module,
        number: int,
        begins: str | None,
        ends: str | None,
        *,
        device: str,
        received: Sequence[int] | None = None,
        outputs: Outputs | None = None,
    ) -> None:
        self.model, self.number, self.begins, self.ends = model, number, begins, ends
        self.device, self.received = device, received
        self._before: AbsentModules | None = None  # the modules of the stages before
        self._outputs = outputs or Outputs()

    def run(self, forward: Callable[[], Any], receive: Callable[[dict[int, Tensor]], dict[int, Tensor]]) -> Any:
        """Calls `forward`, which calls the model. Returns what it returns; raises StageOutput where the stage ends.

        receive(absent): returns the received tensors, for leaves that have these shapes; by the leaves' numbers. Raises
        Refused where this pass calls other modules than the one in which the stages were tried, or needs values that
        are absent.
        """
        absent, unchecked = AbsentTensors(self.device), ExitStack()

        def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if absent.begun:
                raise Refused(message("stage_begins_at_a_module_called_often", module=self.begins, calls=2))
            leaves, structure = tree_flatten((args, kwargs))
            if self.received is None:
                self.received = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_meta]
            received = receive(tensors_in(leaves, self.received, self.begins))
            absent.begin_stage([(leaves[number], tensor) for number, tensor in received.items()])
            # An activation checkpoint around this module would repeat it with absent tensors: what it saves stays.
            unchecked.enter_context(saved_tensors_hooks(lambda saved: saved, lambda saved: saved))
            return tree_unflatten([received.get(number, leaf) for number, leaf in enumerate(leaves)], structure)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            unchecked.close()

        def end(module: nn.Module, args: Any, kwargs: Any) -> None:
            raise StageOutput([absent.present(leaf) for leaf in tree_flatten((args, kwargs))[0]])

        with ExitStack() as stack:
            if self.begins is not None:
                first = self.model.get_submodule(self.begins)
                stack.callback(first.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
                stack.callback(first.register_forward_hook(leave).remove)
                # Before the mode, which would see each parameter that is looked at.
                self._before = self._before or AbsentModules(self.model, self._outputs, reached=first)
                stack.enter_context(unchecked)
                stack.enter_context(absent)
                stack.enter_context(self._before.remembered())
            if self.ends is not None:
                after = self.model.get_submodule(self.ends)
                stack.callback(after.register_forward_pre_hook(end, prepend=True, with_kwargs=True).remove)
            try:
                returned = forward()
            except (RuntimeError, TypeError, ValueError) as error:
                if not needs_values(error):
                    raise
                if self.begins is None:  # its layers have all values: it has gone on into the next stage's
                    raise self._not_called(self.number + 1, self.ends) from error
                raise Refused(
                    message("stage_does_not_run_alone", stage=self.number, module=self.begins, error=error_line(error))
                ) from error
        if self.begins is not None and not absent.begun:
            raise self._not_called(self.number, self.begins)
        if self.ends is not None:
            raise self._not_called(self.number + 1, self.ends)
        return returned

    @staticmethod
    def _not_called(stage: int, module: str | None) -> Refused:
        return Refused(message("stage_module_is_not_called", stage=stage, module=module))


def tensors_in(leaves: Sequence[Any], numbers: Sequence[int], module: str | None) -> dict[int, Tensor]:
    """Returns the leaves with these numbers. Raises Refused where they are no tensors, as when stages were tried."""
    tensors = {number: leaves[number] for number in numbers if number < len(leaves)}
    if len(tensors) < len(numbers) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise Refused(message("block_is_called_otherwise", block=module))
    return tensors


def needs_values(error: BaseException) -> bool:
    """Returns whether an error is torch's about a tensor without values."""
    return "meta" in str(error).lower()


def sizes_at(
    forward: Callable[[], Any], model: nn.Module, cuts: Mapping[str, Sequence[int]], device: str, outputs: Outputs
) -> list[list[tuple[torch.Size, torch.dtype]]]:
    """Returns the shape and dtype of each tensor that is sent. cuts: the first module of a stage -> the leaves of its
    arguments that the stage before sends. outputs: what modules have returned, in other passes of such a model.

    Computes no values: all parameters are absent meanwhile. Raises Refused as StageForward does.
    """
    sizes: dict[str, list[tuple[torch.Size, torch.dtype]]] = {}
    if not cuts:
        return []

    def note(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_flatten((args, kwargs))[0]
        sizes[name] = [(leaf.shape, leaf.dtype) for leaf in tensors_in(leaves, cuts[name], name).values()]
        if len(sizes) == len(cuts):
            raise StageOutput(leaves)

    first_modules = {name: model.get_submodule(name) for name in cuts}
    with ExitStack() as stack:
        for name, module in first_modules.items():
            stack.callback(module.register_forward_pre_hook(partial(note, name), prepend=True, with_kwargs=True).remove)
        stack.enter_context(without(absent_tensors(model, lambda tensor: False)))
        stack.enter_context(AbsentModules(model, outputs, cuts={*first_modules.values()}).remembered())
        stack.enter_context(AbsentTensors(device))
        stack.enter_context(torch.no_grad())
        try:
            with suppress(StageOutput):
                forward()
        except (RuntimeError, TypeError, ValueError) as error:
            if not needs_values(error):
                raise
            stage, name = next(((n, name) for n, name in enumerate(cuts, 1) if name not in sizes), (0, ""))
            raise Refused(
                message("stage_does_not_run_alone", stage=stage, module=name, error=error_line(error))
            ) from error
    for stage, name in enumerate(cuts, 1):
        if name not in sizes:
            raise Refused(message("stage_module_is_not_called", stage=stage, module=name))
    return [sizes[name] for name in cuts]


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
                    like = absent_of_whole(tensor.detach())
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
