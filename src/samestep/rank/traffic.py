"""Traffic: the bytes that this rank sends in collectives, by the axis of the mesh along which it sends them.

A collective counts as what a rank has to send at least, whatever the backend does. Of n bytes over g ranks an
all-reduce sends 2 (g - 1) / g n, an all-gather (g - 1) times the rank's own part, a reduce-scatter (g - 1) times the
part that it gets, an all-to-all (g - 1) / g n, as if it divided them evenly, a broadcast (g - 1) / g n, a send n.
Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from samestep.world.mesh import Mesh

_counting = threading.local()  # .traffic: of the rank that this thread is, while it counts


class Traffic:
    """Counts what this rank sends. mesh: of its ranks.

    sent: axis -> bytes; of a group over several axes, their names with × between them.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.sent: Counter[str] = Counter()

    def begin(self) -> None:
        """Counts the collectives of this thread from now on."""
        _counting.traffic = self

    def end(self) -> None:
        _counting.traffic = None

    def add(self, sent_bytes: float, ranks: Sequence[int]) -> None:
        """Adds bytes that were sent in a group of these ranks."""
        places = [self._mesh.coordinates(rank) for rank in ranks]
        axes = [axis for axis in self._mesh.sizes if len({place[axis] for place in places}) > 1]
        if axes:
            self.sent["×".join(axes)] += round(sent_bytes)


def count_operation(operation: torch._ops.OpOverload, arguments: Sequence[Any]) -> None:
    """Counts an operation of torch's, where it is a collective of ranks that are processes."""
    traffic = active_traffic()
    if traffic and (counted := OPERATIONS.get(operation._schema.name)):
        ranks = dist.get_process_group_ranks(_group(arguments))
        place, factor = counted
        traffic.add(factor(len(ranks)) * _bytes(arguments[place]), ranks)


def count_threaded(collective: str, data: Any, ranks: Sequence[int]) -> None:
    """Counts a collective of ranks that are threads. collective, data: of torch's threaded group."""
    traffic = active_traffic()
    if traffic and (counted := THREADED.get(collective)):
        place, factor = counted
        traffic.add(factor(len(ranks)) * _bytes(data if place is None else data[place]), ranks)


def active_traffic() -> Traffic | None:
    """Returns what counts this thread's collectives."""
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


Factor = Callable[[int], float]  # of the ranks of a group


def both_ways(size: int) -> float:
    return 2 * (size - 1) / size


def others(size: int) -> float:
    return size - 1


def share(size: int) -> float:
    return (size - 1) / size


def once(size: int) -> float:
    return 1.0


# operator -> which argument's bytes count, and how often
OPERATIONS: Mapping[str, tuple[int, Factor]] = {
    "c10d::allreduce_": (0, both_ways),
    "c10d::allreduce_coalesced_": (0, both_ways),
    "c10d::allgather_": (1, others),
    "c10d::_allgather_base_": (1, others),
    "c10d::allgather_coalesced_": (1, others),
    "c10d::allgather_into_tensor_coalesced_": (1, others),
    "c10d::reduce_scatter_": (0, others),
    "c10d::_reduce_scatter_base_": (0, others),
    "c10d::reduce_scatter_tensor_coalesced_": (0, others),
    "c10d::alltoall_": (1, share),
    "c10d::alltoall_base_": (1, share),
    "c10d::broadcast_": (0, share),
    "c10d::reduce_": (0, share),
    "c10d::gather_": (1, share),
    "c10d::scatter_": (0, share),
    "c10d::send": (0, once),
    "_c10d_functional::all_reduce": (0, both_ways),
    "_c10d_functional::all_reduce_": (0, both_ways),
    "_c10d_functional::all_reduce_coalesced": (0, both_ways),
    "_c10d_functional::all_reduce_coalesced_": (0, both_ways),
    "_c10d_functional::all_gather_into_tensor": (0, others),
    "_c10d_functional::all_gather_into_tensor_out": (0, others),
    "_c10d_functional::all_gather_into_tensor_coalesced": (0, others),
    "_c10d_functional::reduce_scatter_tensor": (0, share),
    "_c10d_functional::reduce_scatter_tensor_out": (0, share),
    "_c10d_functional::reduce_scatter_tensor_coalesced": (0, share),
    "_c10d_functional::all_to_all_single": (0, share),
    "_c10d_functional::broadcast": (0, share),
    "_c10d_functional::broadcast_": (0, share),
    "_c10d_functional::isend": (0, once),
}
# The same by the names of torch's threaded group, whose collectives get all in one; None: that is the argument.
THREADED: Mapping[str, tuple[int | None, Factor]] = {
    "AllReduce": (None, both_ways),
    "Broadcast": (None, share),
    "AllGather": (1, others),
    "ReduceScatter": (0, others),
    "AllToAll": (1, share),
    "AllToAllBase": (1, share),
    "Gather": (1, share),
    "Scatter": (0, share),
    "send": (None, once),
}
