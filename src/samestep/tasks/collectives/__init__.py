"""Runs the collectives of a plan on one rank: what it held before and after, and how long each took.

calls.py has the calls themselves, arguments.py builds what they take, values.py and timing.py call them. Ranks tell
rank 0 through the rendezvous store, so that no collective reports on itself.
"""

from __future__ import annotations

import json

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from samestep.errors import UserError
from samestep.rank.group import collectives_store, process_group
from samestep.records.collectives import CollectivePlan, CollectiveRank
from samestep.records.files import as_json, finite, from_json
from samestep.tasks.collectives.arguments import source
from samestep.tasks.collectives.timing import measure
from samestep.tasks.collectives.values import held_values
from samestep.world import World


def run(plan: CollectivePlan, world: World) -> list[CollectiveRank]:
    """Returns what each rank observed, on rank 0; nothing on the others. Raises UserError without the backend."""
    if not dist.is_backend_available(plan.backend):
        raise UserError(f"--backend {plan.backend}: {_how_to_get(plan.backend)}")
    with process_group(world, backend=plan.backend):
        store = collectives_store()
        assert store is not None
        held = held_values(plan, world, store)
        timed, unmeasured = measure(plan, world, store) if plan.sizes else ([], {})
        code = {name: source(name) for name in plan.collectives} if world.rank == 0 else {}
        return _gather(store, world, CollectiveRank(held, timed, code, unmeasured))


def _how_to_get(backend: str) -> str:
    if backend == "mpi":
        return "this torch is built without MPI; build torch from source where MPI is installed, or use gloo"
    return "this torch is built without it; install a build of torch for your GPU, or use gloo"


def _gather(store: Store, world: World, answer: CollectiveRank) -> list[CollectiveRank]:
    if world.rank:
        store.set(f"rank {world.rank}", json.dumps(finite(as_json(answer))))
        return []
    answers = (json.loads(store.get(f"rank {rank}")) for rank in range(1, world.size))
    return [answer, *(from_json(CollectiveRank, read) for read in answers)]
