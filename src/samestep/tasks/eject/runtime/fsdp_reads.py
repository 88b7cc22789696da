"""Lets the units that FSDP shards return their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from samestep.job import MicroBatch


class FSDPReads:
    """A unit that returns a parameter, or a view of it, returns a copy: FSDP frees the original after its forward."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], remedy: str) -> None:
        for unit in units:
            unit.register_forward_hook(self.returned)

    @staticmethod
    def returned(unit: nn.Module, inputs: Any, output: Any) -> Any:
        own = {p.untyped_storage()._cdata for p in unit.parameters() if not isinstance(p, DTensor)}
        return tree_map_only(Tensor, lambda t: t.clone() if t.untyped_storage()._cdata in own else t, output)

    def first(self, micro_batch: MicroBatch) -> Any:
        """samestep looks here for parameters that are read where they are freed."""
        return nullcontext()
