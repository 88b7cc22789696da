"""Calls each collective with small values in each dtype and reduction, and notes what the rank held."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from samestep.rank.membership import says_lost
from samestep.records.collectives import COLLECTIVES, Case, CollectivePlan, RankValues
from samestep.tasks.collectives.arguments import build, has_values, numbers, text
from samestep.tasks.collectives.calls import CALLS
from samestep.world import World

WORLD = "world"
LATE_S = 0.02  # how much later than the others the last rank comes to a barrier

Groups = dict[str, tuple[ProcessGroup, tuple[int, ...]]]  # name -> the group that this rank is in, and its ranks


def held_values(plan: CollectivePlan, world: World, store: Store) -> list[RankValues]:
    """Calls every case of the plan once. Returns what this rank held."""
    groups = _groups(plan, world)
    values = []
    for number, (name, collective, dtype, reduction) in enumerate(_cases(plan, groups)):
        group, members = groups[name]
        case = Case(collective, dtype, reduction, name, members, members[1 % len(members)])
        values.append(_call(case, plan, world, group, store, f"case {number} {members[0]}"))
    return values


def _cases(plan: CollectivePlan, groups: Groups) -> Iterator[tuple[str, str, str, str]]:
    """Yields (group, collective, dtype, reduction): all of them in the world, one dtype and reduction elsewhere."""
    for group in groups:
        for name in plan.collectives:
            facts = COLLECTIVES[name]
            typed = has_values(name) and not facts.objects
            dtypes, reductions = plan.dtypes if typed else ("",), plan.reductions if facts.reduces else ("",)
            if group != WORLD:
                dtypes, reductions = dtypes[:1], reductions[:1]
            yield from ((group, name, dtype, reduction) for dtype in dtypes for reduction in reductions)


def _groups(plan: CollectivePlan, world: World) -> Groups:
    """Returns the world; the ranks with even numbers and those with odd ones; each dimension of a mesh of two columns.

    They end with the world: a rank that closed one earlier would take it from those that are still in its last call.
    """
    default_group = dist.group.WORLD
    assert default_group is not None
    groups: Groups = {WORLD: (default_group, tuple(range(world.size)))}
    if plan.groups:
        for parity in (0, 1):
            ranks = tuple(range(parity, world.size, 2))
            group = dist.new_group(list(ranks))
            if world.rank in ranks:
                assert isinstance(group, ProcessGroup)
                groups["sub-group"] = (group, ranks)
        groups |= _mesh(world)
    return groups


def _mesh(world: World) -> Groups:
    from torch.distributed.device_mesh import init_device_mesh

    rows = world.size // 2 if world.size % 2 == 0 else 1
    mesh = init_device_mesh(world.device.partition(":")[0], (rows, world.size // rows), mesh_dim_names=("rows", "cols"))
    of_mesh = {f"mesh {name}": mesh.get_group(name) for name in ("rows", "cols")}
    return {name: (group, tuple(dist.get_process_group_ranks(group))) for name, group in of_mesh.items()}


def _call(case: Case, plan: CollectivePlan, world: World, group: ProcessGroup, store: Store, key: str) -> RankValues:
    if not has_values(case.collective):
        return _wait(case, world, group, store, key)
    arguments = build(case, world.rank, plan.elements, world.device, group)
    if arguments is None:
        return RankValues(world.rank, case, [], [], "-", "-", called=False)
    before = (numbers(arguments.before()), _named(arguments.given, arguments.before()))
    error = ""
    try:
        arguments()
    except Exception as raised:
        error = _refusal(raised)
    after = (numbers(arguments.after()), _named(arguments.filled, arguments.after()))
    return RankValues(world.rank, case, before[0], after[0], before_text=before[1], after_text=after[1], error=error)


def _named(name: str, value: object) -> str:
    return f"{name} = {text(value)}"


def _wait(case: Case, world: World, group: ProcessGroup, store: Store, key: str) -> RankValues:
    """Calls a barrier. The result is how many ranks have reached it when this one returns; the last arrives late."""
    if world.rank == case.members[-1]:
        time.sleep(LATE_S)
    arrived = store.add(key, 1)
    error = ""
    try:
        CALLS[case.collective](group)
    except Exception as raised:
        error = _refusal(raised)
    left = store.add(key, 0)
    at_last = "arrives last" if world.rank == case.members[-1] else "arrives"
    return RankValues(
        world.rank,
        case,
        [[float(arrived)]],
        [[float(left)]],
        before_text=at_last,
        after_text=f"{left} ranks have arrived",
        error=error,
    )


def _refusal(error: Exception) -> str:
    """Returns the first line of what a call raised. Raises the error itself where another rank is lost."""
    if says_lost(error):
        raise error
    line = f"{type(error).__name__}: {error}".splitlines()[0][:160]
    # torch puts a ReduceOp's number as a byte
    return "".join(character if character.isprintable() else " " for character in line)
