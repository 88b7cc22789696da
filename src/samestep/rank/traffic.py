"""Traffic: the bytes that this rank sends in collectives, by the axis of the mesh along which it sends them.

A collective counts as what a rank has to send at least, whatever the backend does. Of n bytes over g ranks an
all-reduce sends 2 (g - 1) / g n, an all-gather (g - 1) times the rank's own part, a reduce-scatter (g - 1) times the
part that it gets, an all-to-all (g - 1) / g n, as if it divided them evenly, the root of a broadcast n, and the others
what hands it on, a send n.
Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from samestep.world.mesh import Mesh

_counting = threading.local()  # .traffic: that of this thread's rank, while it counts, where ranks are threads


class Traffic:
    """Counts what this rank sends. mesh: of its ranks.

    sent: axis -> bytes; of a group over several axes, their names with × between them.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.sent: Counter[str] = Counter()

    def begin(self) -> None:
        """Counts the collectives of this thread's rank from now on."""
        _counting.traffic = self

    def end(self) -> None:
        _counting.traffic = None

    def count_operation(self, operation: torch._ops.OpOverload, arguments: Sequence[Any]) -> None:
        """Counts an operation of torch's, where it is a collective of ranks that are processes."""
        counted = OPERATIONS.get(operation._schema.name)
        if counted is None:
            return
        ranks = dist.get_process_group_ranks(_group(arguments))
        root = None if counted.root is None else arguments[counted.root]
        is_root = root is not None and ranks[root] == dist.get_rank()
        self._add(counted.factor(len(ranks), is_root) * _bytes(arguments[counted.place]), ranks)

    def count(self, name: str, data: Any, ranks: Sequence[int], *, is_root: bool = False) -> None:
        """Counts a collective of ranks that are threads, by its name in torch's threaded group."""
        if counted := THREADED.get(name):
            sent_bytes = _bytes(data if counted.place is None else data[counted.place])
            self._add(counted.factor(len(ranks), is_root) * sent_bytes, ranks)

    def _add(self, sent_bytes: float, ranks: Sequence[int]) -> None:
        places = [self._mesh.coordinates(rank) for rank in ranks]
        axes = [axis for axis in self._mesh.sizes if len({place[axis] for place in places}) > 1]
        if axes:
            self.sent["×".join(axes)] += round(sent_bytes)


def count_threaded(collective: Any, data: Any, ranks: Sequence[int], place: int) -> None:
    """Counts a collective of torch's threaded group for the rank of this thread. place: its own in the group."""
    if traffic := _traffic():
        root = getattr(collective, "src", getattr(collective, "dst", None))
        traffic.count(type(collective).__name__, data, ranks, is_root=place == root)


def count_sent(tensors: Sequence[Tensor], ranks: Sequence[int]) -> None:
    """Counts what the rank of this thread sends to another of its group."""
    if traffic := _traffic():
        traffic.count("send", tensors, ranks)


def _traffic() -> Traffic | None:
    """Returns what counts the collectives of this thread's rank."""
    return getattr(_counting, "traffic", None)


def _group(arguments: Sequence[Any]) -> dist.ProcessGroup:
    """Returns the process group among the arguments of a collective, or that of the name among them."""
    boxed = next((value for value in arguments if isinstance(value, torch.ScriptObject)), None)
    if boxed is not None:
        return dist.ProcessGroup.unbox(boxed)
    name: Any = next(value for value in reversed(arguments) if isinstance(value, str))
    return _resolve_process_group(name)


def _bytes(values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


Factor = Callable[[int, bool], float]  # of a group's ranks, and whether this one is the collective's root


class Counted(NamedTuple):
    """Which argument's bytes count, and how often. place: None: the only one. root: the argument that is the root's
    place in the group; None: all ranks send alike."""

    place: Any
    factor: Factor
    root: int | None = None


def both_ways(size: int, is_root: bool) -> float:
    return 2 * (size - 1) / size


def others(size: int, is_root: bool) -> float:
    return size - 1


def share(size: int, is_root: bool) -> float:
    return (size - 1) / size


def once(size: int, is_root: bool) -> float:
    return 1.0


def from_root(size: int, is_root: bool) -> float:
    """Returns how often a rank sends the argument: a root once; the other ranks, but for the last one, hand it on."""
    return 1.0 if is_root else (size - 2) / (size - 1) if size > 1 else 0.0


def to_root(size: int, is_root: bool) -> float:
    return 0.0 if is_root else 1.0


# By the names of torch's operators.
OPERATIONS: Mapping[str, Counted] = {
    "c10d::allreduce_": Counted(0, both_ways),
    "c10d::allreduce_coalesced_": Counted(0, both_ways),
    "c10d::allgather_": Counted(1, others),
    "c10d::_allgather_base_": Counted(1, others),
    "c10d::allgather_coalesced_": Counted(1, others),
    "c10d::allgather_into_tensor_coalesced_": Counted(1, others),
    "c10d::reduce_scatter_": Counted(0, others),
    "c10d::_reduce_scatter_base_": Counted(0, others),
    "c10d::reduce_scatter_tensor_coalesced_": Counted(0, others),
    "c10d::alltoall_": Counted(1, share),
    "c10d::alltoall_base_": Counted(1, share),
    "c10d::broadcast_": Counted(0, from_root, 2),
    "c10d::reduce_": Counted(0, to_root, 3),
    "c10d::gather_": Counted(1, to_root, 3),
    "c10d::scatter_": Counted(1, share),
    "c10d::send": Counted(0, once),
    "_c10d_functional::all_reduce": Counted(0, both_ways),
    "_c10d_functional::all_reduce_": Counted(0, both_ways),
    "_c10d_functional::all_reduce_coalesced": Counted(0, both_ways),
    "_c10d_functional::all_reduce_coalesced_": Counted(0, both_ways),
    "_c10d_functional::all_gather_into_tensor": Counted(0, others),
    "_c10d_functional::all_gather_into_tensor_out": Counted(0, others),
    "_c10d_functional::all_gather_into_tensor_coalesced": Counted(0, others),
    "_c10d_functional::reduce_scatter_tensor": Counted(0, share),
    "_c10d_functional::reduce_scatter_tensor_out": Counted(0, share),
    "_c10d_functional::reduce_scatter_tensor_coalesced": Counted(0, share),
    "_c10d_functional::all_to_all_single": Counted(0, share),
    "_c10d_functional::broadcast": Counted(0, from_root, 1),
    "_c10d_functional::broadcast_": Counted(0, from_root, 1),
    "_c10d_functional::isend": Counted(0, once),
}
# The names of torch's threaded group, whose collectives get everything in one argument.
THREADED: Mapping[str, Counted] = {
    "AllReduce": Counted(None, both_ways),
    "Broadcast": Counted(None, from_root),
    "AllGather": Counted(1, others),
    "ReduceScatter": Counted(0, others),
    "AllToAll": Counted(1, share),
    "AllToAllBase": Counted(1, share),
    "Gather": Counted(1, to_root),
    "Scatter": Counted(1, share),
    "send": Counted(None, once),
}
