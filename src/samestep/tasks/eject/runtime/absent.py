"""What a script has not of samestep's, for the loops of engines that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from samestep.errors import UserError
from samestep.job import MicroBatch

Made = TypeVar("Made")


class FSDPReads:
    """A unit that returns a parameter, or a view of it, returns a copy: FSDP frees the original after its forward."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], remedy: str) -> None:
        for unit in units:
            unit.register_forward_hook(self.returned)

    @staticmethod
    def returned(unit: nn.Module, inputs: Any, output: Any) -> Any:
        own = {p.untyped_storage()._cdata for p in unit.parameters() if not isinstance(p, DTensor)}
        return tree_map_only(Tensor, lambda t: t.clone() if t.untyped_storage()._cdata in own else t, output)

    def first(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Does nothing: samestep looks here for parameters that are read where they are freed."""
        return nullcontext()


def alike_on_ranks(function: Callable[..., Made]) -> Callable[..., Made]:
    """Returns a function as it is: each rank is a process."""
    return function


def split_output(*arguments: Any) -> None:
    raise UserError("a script has no loss_parallel; leave it out")


def losses_in_parallel() -> AbstractContextManager[None]:
    raise UserError("a script has no loss_parallel; leave it out")
