"""Lets the only rank of a replay stand for all replicas, for a script that must be told of all ranks.

A script that asserts the product of its sizes runs only where each of them is what it was. So a group of one replica
has the only rank, which holds the whole model; and a group along the replicas counts as many as in the recording, each
of which would do what the only rank does: their sum is a multiple, and their mean is the same. By which factor the
ranks scale what they add up over replicas, their own records tell.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from samestep.message import Message, message
from samestep.recorder.one_rank import make_groups_of_one_rank

SUMMED = ("all_reduce", "reduce")
EXCHANGED = (
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


class AlikeReplicas:
    """Patches process groups. replicas: the ranks of each. stop: ends the replay with the reason.

    adds_numbers: whether the script has added up single numbers over ranks of which some hold pieces of one model, and
    some are replicas: of pieces it is another sum than of what each rank has whole.
    """

    def __init__(self, replicas: Sequence[Sequence[int]], stop: Callable[[Message], Any]) -> None:
        self._replica_of = {rank: place for place, ranks in enumerate(replicas) for rank in ranks}
        self._stop = stop
        self._groups: list[tuple[Any, list[int]]] = []  # those of several replicas, and their ranks
        self.adds_numbers = False

    def attach(self) -> None:
        """Patches what makes groups, asks for their sizes, and calls their collectives."""
        make_groups_of_one_rank(self._note)
        told, known = dist.get_world_size, sys.modules["torch.distributed.distributed_c10d"].get_world_size

        @functools.wraps(known)
        def new_size(group: Any = None) -> int:
            if _is_torch(sys._getframe(1)):
                return int(known(group))
            ranks = self._ranks(group)
            return int(told(group)) if ranks is None else len(ranks)

        dist.get_world_size = new_size
        for name in SUMMED:
            self._patch(name, self._add_up)
        for name in EXCHANGED:
            if hasattr(dist, name):
                self._patch(name, self._refuse)

    def _note(self, group: Any, ranks: list[int]) -> None:
        if len({self._replica_of.get(rank, -1) for rank in ranks}) > 1:
            self._groups.append((group, ranks))

    def _ranks(self, group: Any) -> list[int] | None:
        """Returns the recorded ranks of a group of several replicas; None of another one."""
        if group is None or group is dist.group.WORLD:
            return [*self._replica_of]
        return next((ranks for known, ranks in self._groups if known is group), None)

    def _patch(self, name: str, act: Callable[[Any, list[int], str], None]) -> None:
        collective = getattr(dist, name)
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def new_collective(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            ranks = self._ranks(given.arguments.get("group"))
            # torch's own count the ranks that there are.
            if ranks is not None and not _is_torch(sys._getframe(1)):
                act(given.arguments, ranks, name)
            return collective(*given.args, **given.kwargs)

        setattr(dist, name, new_collective)

    def _add_up(self, given: Any, ranks: list[int], name: str) -> None:
        if given.get("op", dist.ReduceOp.SUM) != dist.ReduceOp.SUM:
            return
        tensor = given["tensor"]
        several = len(ranks) > len({self._replica_of.get(rank, -1) for rank in ranks})
        self.adds_numbers |= several and tensor.numel() == 1
        tensor.detach().mul_(len(ranks))

    def _refuse(self, given: Any, ranks: list[int], name: str) -> None:
        """Ends the replay where replicas tell each other what each has of other rows."""
        tensors = [leaf for leaf in tree_leaves(dict(given)) if isinstance(leaf, Tensor)]
        if any(tensor.is_floating_point() and tensor.numel() > 1 for tensor in tensors):
            self._stop(message("replicas_exchange", operation=name))
        if name == "all_gather":
            first, *others = given["tensor_list"]
            for other in others:
                other.copy_(given["tensor"])
            given["tensor_list"] = [first]


def _is_torch(caller: FrameType) -> bool:
    return str(caller.f_globals.get("__name__", "")).partition(".")[0] == "torch"
