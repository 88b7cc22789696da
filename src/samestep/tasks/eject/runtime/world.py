"""World: the place of this process in the training. A script has that of its kind of processes in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor


class World(Protocol):
    """The place of this process in the training.

    rank: this process among `size`; local_size: how many are on this machine. devices: what this process drives.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_size(self) -> int: ...

    @property
    def devices(self) -> tuple[str, ...]: ...

    @property
    def device(self) -> str: ...

    def gather(self, value: Any) -> list[Any]: ...

    def broadcast(self, tensors: Iterable[Tensor]) -> None: ...
