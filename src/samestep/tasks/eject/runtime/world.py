"""World: the place of this process in the training."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """The place of this process in the training.

    rank: this process among `size`; local_size: how many are on this machine. devices: what this process drives. mesh:
    how the ranks are arranged; None: each is a replica.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    devices: tuple[str, ...] = ("cpu",)
    mesh: Any = None

    @property
    def device(self) -> str:
        return self.devices[0]

    @property
    def replicas(self) -> int:
        """The number of replicas, which train on different rows."""
        return self.mesh.replicas if self.mesh else self.size

    @property
    def replica(self) -> int:
        """The number of the replica that this rank belongs to."""
        return self.mesh.replica(self.rank) if self.mesh else self.rank

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Gives all ranks the tensors of rank 0."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor, src=0)


def process_group(world: World) -> AbstractContextManager[None]:
    """Does nothing: the start of the script has opened torch's process group."""
    return nullcontext()
