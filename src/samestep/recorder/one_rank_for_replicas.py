"""Lets the only rank of a replay stand for all replicas, for a script that must be told of all ranks.

A script that asserts the product of its sizes runs only where each of them is what it was. So a group of one replica
has the only rank, which holds the whole model; and a group along the replicas counts as many as in the recording, each
of which would do what the only rank does: their sum is a multiple, and their mean is the same. By which factor the
ranks scale what they add up over replicas, their own records tell. Where one rank cannot stand for all, the replay
ends.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from samestep.job.foreign import is_a
from samestep.message import Message, message
from samestep.rank.hooks import Hooks, called_by_torch
from samestep.recorder.group_operations import FUNCTIONAL, functional_collectives
from samestep.recorder.one_rank import make_groups_of_one_rank, tell_ranks
from samestep.recorder.patches import patch_autograd
from samestep.records.torch_collectives import COLLECTIVES, OF_ONE_TENSOR

SUMMED = [function.name for function in OF_ONE_TENSOR if function.kind == "reduce" and function.is_in_place]
EXCHANGED = [function.name for function in OF_ONE_TENSOR if not function.is_in_place]
GATHERED = {function.name: function for function in OF_ONE_TENSOR if function.kind == "gather"}
# Functions without one tensor that would tell what the other replicas have.
NOT_STOOD_FOR = [function.name for function in COLLECTIVES if function.takes != "tensors"]
NOT_STOOD_FOR.remove("broadcast_object_list")


class OneRankForReplicas:
    """Patches process groups. replicas: the ranks of each. stop: ends the replay with the reason.

    adds_numbers: whether the script, between a backward pass and its step, has added up single numbers over ranks of
    which some hold pieces of one model, and some are replicas: of pieces it is another sum than of what each rank has
    whole. What is added up at another time to be printed clips no gradient.
    """

    def __init__(self, replicas: Sequence[Sequence[int]], stop: Callable[[Message], Any]) -> None:
        self._replica_of = {rank: place for place, ranks in enumerate(replicas) for rank in ranks}
        self._stop = stop
        self._groups: list[tuple[Any, list[int]]] = []  # groups of several replicas, and their ranks
        self._has_gradients = False  # whether a backward pass has begun, and its step has not ended
        self.adds_numbers = False

    def attach(self, hooks: Hooks) -> None:
        """Patches what makes groups and meshes, asks for their sizes, and calls their collectives."""
        make_groups_of_one_rank(hooks, self._note)
        tell_ranks(hooks, len(self._replica_of), self._ranks)
        for names, act in ((SUMMED, self._add_up), (EXCHANGED, self._exchange), (NOT_STOOD_FOR, self._refuse)):
            for name in (name for name in names if hasattr(dist, name)):
                hooks.attach(dist, name, self._standing_in(dist, name, act))
        functional = importlib.import_module(FUNCTIONAL)
        for name in functional_collectives(functional):
            hooks.attach(functional, name, self._standing_in(functional, name, self._refuse))
        patch_autograd(hooks, self._begin_gradients, lambda: None)
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

    def _standing_in(self, module: Any, name: str, act: Callable[[Any, list[int], str], None]) -> Callable[..., Any]:
        signature = inspect.signature(getattr(module, name))

        def new_collective(collective: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            ranks = self._ranks(given.arguments.get("group"))
            # torch's own functions count the ranks that there are.
            if ranks is not None and not called_by_torch():
                act(given.arguments, ranks, name)
            return collective(*given.args, **given.kwargs)

        return new_collective

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
        function = GATHERED.get(name)
        sent = given.get(function.sent) if function else None
        if function is None or sent is None or (sent.is_floating_point() and sent.numel() > 1):
            self._stop(message("replicas_exchange", operation=name))
            return
        gathered, sent = given[function.received], sent.detach()
        is_list = is_a(gathered, list)
        parts = gathered if is_list else gathered.view(len(ranks), *sent.shape)
        for part in parts:
            part.copy_(sent)
        given[function.received] = [parts[0]] if is_list else parts[0]
