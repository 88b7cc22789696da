"""Lets the only rank of a replay stand for all replicas, for a script that must be told of all ranks.

A script that asserts the product of its sizes runs only where each of them is what it was. So a group of one replica
has the only rank, which holds the whole model; and a group along the replicas counts as many as in the recording, each
of which would do what the only rank does: their sum is a multiple, and their mean is the same. By which factor the
ranks scale what they add up over replicas, their own records tell. Where one rank cannot stand for all, the replay
ends.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from samestep.job.foreign import is_a
from samestep.message import Message, message
from samestep.recorder.one_rank import OUT_OF_PLACE, called_by_torch, make_groups_of_one_rank, tell_ranks
from samestep.recorder.patches import patch_autograd

SUMMED = ("all_reduce", "reduce")
EXCHANGED = (*OUT_OF_PLACE, "gather", "scatter")
# What hands out what each has: its arguments with what is received, and with what is sent.
GATHERED = {name: names for name, names in OUT_OF_PLACE.items() if name.startswith("all_gather")}
GATHERED["gather"] = ("gather_list", "tensor")
# What has no tensor of which it could be told what the other replicas have.
NOT_STOOD_FOR = (
    "all_reduce_coalesced",
    "all_gather_coalesced",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
)


class AlikeReplicas:
    """Patches process groups. replicas: the ranks of each. stop: ends the replay with the reason.

    adds_numbers: whether the script, between a backward pass and its step, has added up single numbers over ranks of
    which some hold pieces of one model, and some are replicas: of pieces it is another sum than of what each rank has
    whole. What is added up at another time to be printed clips no gradient.
    """

    def __init__(self, replicas: Sequence[Sequence[int]], stop: Callable[[Message], Any]) -> None:
        self._replica_of = {rank: place for place, ranks in enumerate(replicas) for rank in ranks}
        self._stop = stop
        self._groups: list[tuple[Any, list[int]]] = []  # those of several replicas, and their ranks
        self._has_gradients = False  # whether a backward pass has begun, and its step has not ended
        self.adds_numbers = False

    def attach(self) -> None:
        """Patches what makes groups and meshes, asks for their sizes, and calls their collectives."""
        make_groups_of_one_rank(self._note)
        tell_ranks(len(self._replica_of), self._ranks)
        for name in SUMMED:
            self._patch(dist, name, self._add_up)
        for name in EXCHANGED:
            self._patch(dist, name, self._exchange)
        for name in NOT_STOOD_FOR:
            self._patch(dist, name, self._refuse)
        functional = importlib.import_module("torch.distributed._functional_collectives")
        for name, collective in [*vars(functional).items()]:
            is_public = inspect.isfunction(collective) and not name.startswith(("_", "legacy_"))
            if is_public and "group" in inspect.signature(collective).parameters:
                self._patch(functional, name, self._refuse)
        patch_autograd(self._begin_gradients, lambda: None)
        register_optimizer_step_post_hook(self._end_gradients)

    def refuse_mesh(self, ranks: Sequence[int]) -> None:
        """Ends the replay where a mesh of several replicas is made: its groups would be of one rank, and not known."""
        if self._are_replicas(ranks):
            self._stop(message("replica_stands_not_for_all", operation="DeviceMesh"))

    def _begin_gradients(self, loss: Any) -> None:
        self._has_gradients = True

    def _end_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._has_gradients = False

    def _are_replicas(self, ranks: Sequence[int]) -> bool:
        return len({self._replica_of.get(rank, -1) for rank in ranks}) > 1

    def _note(self, group: Any, ranks: list[int] | None) -> None:
        ranks = sorted(self._replica_of) if ranks is None else ranks
        if self._are_replicas(ranks):
            self._groups.append((group, ranks))

    def _ranks(self, group: Any) -> list[int] | None:
        """Returns the recorded ranks of a group of several replicas; None of another one."""
        if group is None or group is dist.group.WORLD:
            return sorted(self._replica_of)
        # Functional collectives take a group's name, too.
        return next((ranks for known, ranks in self._groups if group in (known, known.group_name)), None)

    def _patch(self, module: Any, name: str, act: Callable[[Any, list[int], str], None]) -> None:
        if not hasattr(module, name):
            return
        collective = getattr(module, name)
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def new_collective(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            ranks = self._ranks(given.arguments.get("group"))
            # torch's own count the ranks that there are.
            if ranks is not None and not called_by_torch():
                act(given.arguments, ranks, name)
            return collective(*given.args, **given.kwargs)

        setattr(module, name, new_collective)

    def _add_up(self, given: Any, ranks: list[int], name: str) -> None:
        if given.get("op", dist.ReduceOp.SUM) != dist.ReduceOp.SUM:
            return
        tensor = given["tensor"]
        several = len(ranks) > len({self._replica_of.get(rank, -1) for rank in ranks})
        self.adds_numbers |= self._has_gradients and several and tensor.numel() == 1
        tensor.detach().mul_(len(ranks))

    def _refuse(self, given: Any, ranks: list[int], name: str) -> None:
        self._stop(message("replica_stands_not_for_all", operation=name))

    def _exchange(self, given: Any, ranks: list[int], name: str) -> None:
        """Gathers a number as if all replicas had it; ends the replay where they tell each other what each has of other
        rows."""
        sent = given.get(GATHERED.get(name, ("", ""))[1])
        if sent is None or (sent.is_floating_point() and sent.numel() > 1):
            self._stop(message("replicas_exchange", operation=name))
        received = GATHERED[name][0]
        gathered, sent = given[received], sent.detach()
        is_list = is_a(gathered, list)
        parts = gathered if is_list else gathered.view(len(ranks), *sent.shape)
        for part in parts:
            part.copy_(sent)
        given[received] = [parts[0]] if is_list else parts[0]
