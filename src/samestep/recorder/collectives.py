"""Reads the collectives of this process from torch's flight recorder, which sees those of C++ (DDP's), too."""

from __future__ import annotations

import torch.distributed as dist

from samestep.rank import flight_recorder
from samestep.records.beside_steps import GroupSeen
from samestep.records.flight_recorder import Entry

ENTRIES = 20_000  # that torch keeps


def entries() -> list[Entry]:
    """Returns the collectives that torch has recorded, in their order; none where it records none."""
    return [each for each in flight_recorder.read() if not each.is_p2p]


def since(record: int) -> list[str]:
    """Returns the operations after the entry with this number."""
    return [each.operation for each in entries() if each.record_id > record]


def latest() -> int:
    """Returns the number of the last entry; -1 without any."""
    return max((each.record_id for each in entries()), default=-1)


def groups() -> dict[str, GroupSeen]:
    """Returns the collectives of each process group, by its name."""
    by_name: dict[str, GroupSeen] = {}
    members = _members()
    for entry in entries():
        if entry.group not in by_name:
            by_name[entry.group] = GroupSeen(members.get(entry.group, []), [], entry.collective_seq_id)
        by_name[entry.group].calls.append(_call(entry))
    return by_name


def _members() -> dict[str, list[int]]:
    if not dist.is_available() or not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    # Of a group that this rank is not in there is a mark in place of the group, without a name.
    named = [(world.pg_names[group], ranks) for group, ranks in world.pg_group_ranks.items() if group in world.pg_names]
    return {str(name): sorted(ranks) for name, ranks in named}


def _call(entry: Entry) -> str:
    shapes = " ".join(str([*each]) for each in entry.input_sizes)
    types = " ".join(dict.fromkeys(each.lower() for each in entry.input_dtypes))
    return " ".join(filter(None, [entry.operation, shapes, types]))
