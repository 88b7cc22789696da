"""Runs the collectives of a plan on one rank: what it held before and after, and how long each took.

calls.py has the calls themselves, arguments.py builds what they take, values.py and this module call them. Ranks tell
rank 0 through the rendezvous store, so that no collective reports on itself.
"""

from __future__ import annotations

import json
import math
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from samestep.errors import UserError
from samestep.rank.membership import says_lost
from samestep.rank.process_group import collectives_store, process_group
from samestep.records.collectives import BYTES, COLLECTIVES, Case, CollectivePlan, CollectiveRank, Timed
from samestep.records.files import as_json, finite, from_json
from samestep.tasks.collectives.arguments import Arguments, build, has_values, source
from samestep.tasks.collectives.calls import CALLS
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


LEAST, MOST = 3, 100  # calls of a measurement


def measure(plan: CollectivePlan, world: World, store: Store) -> tuple[list[Timed], dict[str, str]]:
    """Returns this rank's times, and collective -> why it has none."""
    timed: list[Timed] = []
    unmeasured: dict[str, str] = {}
    for name in plan.collectives:
        for size in plan.sizes if has_values(name) else (0,):
            try:
                timed.append(_measure_one(name, size, plan, world, store))
            except Exception as error:
                if says_lost(error):
                    raise
                unmeasured[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                break
    return timed, unmeasured


def _measure_one(name: str, size: int, plan: CollectivePlan, world: World, store: Store) -> Timed:
    facts, group, ranks = COLLECTIVES[name], dist.group.WORLD, tuple(range(world.size))
    assert group is not None
    dtype = plan.dtypes[0]
    case = Case(name, dtype, plan.reductions[0] if facts.reduces else "", "world", ranks, ranks[0])
    parts, item = world.size if facts.chunks else 1, 1 if facts.objects else BYTES[dtype]
    elements = max(1, size // (parts * item))
    if has_values(name):
        arguments = build(case, world.rank, elements, world.device, group, zeros=True)
    else:
        elements = 0
        arguments = Arguments(CALLS[name], {"group": group}, "", "")
    _seconds(arguments, world)  # it connects the ranks, and touches the memory
    once = _seconds(arguments, world)
    count = _agree(store, f"{name} {size}", world, min(MOST, max(LEAST, math.ceil(plan.seconds / max(once, 1e-9)))))
    return Timed(name, elements * parts * item, [_seconds(arguments, world) for _ in range(count)])


def _seconds(arguments: Arguments | None, world: World) -> float:
    """Returns the seconds of one call on this rank; 0 for a rank that has no part in it."""
    dist.barrier()
    _synchronize(world)
    began = time.perf_counter()
    if arguments is not None:
        arguments()
        _synchronize(world)
    return time.perf_counter() - began if arguments is not None else 0.0


def _synchronize(world: World) -> None:
    if world.device.startswith("cuda"):
        torch.cuda.synchronize()


def _agree(store: Store, key: str, world: World, count: int) -> int:
    """Returns rank 0's count on every rank."""
    if world.rank == 0:
        store.set(f"count {key}", str(count))
    return int(store.get(f"count {key}"))
