"""Reads the collectives of this process from torch's flight recorder, which sees those of C++ (DDP's), too."""

from __future__ import annotations

import json
import os
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from samestep.records.beside_steps import GroupSeen

ENTRIES = 20_000  # that torch keeps


def enable() -> None:
    """Makes torch record collectives. Call it before the process group is opened."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(ENTRIES))


def entries() -> list[dict[str, Any]]:
    """Returns the collectives that torch has recorded, in their order; none where it records none."""
    if not hasattr(_distributed_c10d, "_dump_fr_trace_json"):  # private: a version may lack it
        return []
    try:
        dumped = _distributed_c10d._dump_fr_trace_json()
        return [each for each in json.loads(dumped).get("entries", []) if not each["is_p2p"]]
    except (KeyError, ValueError):
        return []


def since(record: int) -> list[str]:
    """Returns the operations after the entry with this number."""
    return [_operation(each) for each in entries() if each["record_id"] > record]


def latest() -> int:
    """Returns the number of the last entry; -1 without any."""
    return max((each["record_id"] for each in entries()), default=-1)


def groups() -> dict[str, GroupSeen]:
    """Returns the collectives of each process group, by its name."""
    found: dict[str, GroupSeen] = {}
    members = _members()
    for entry in entries():
        name = str(entry["process_group"][0])
        if name not in found:
            found[name] = GroupSeen(members.get(name, []), [], int(entry["collective_seq_id"]))
        found[name].calls.append(_call(entry))
    return found


def _members() -> dict[str, list[int]]:
    if not dist.is_available() or not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    return {str(world.pg_names[group]): sorted(ranks) for group, ranks in world.pg_group_ranks.items()}


def _operation(entry: dict[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _call(entry: dict[str, Any]) -> str:
    shapes = " ".join(str(each) for each in entry["input_sizes"])
    types = " ".join(dict.fromkeys(str(each).lower() for each in entry["input_dtypes"]))
    return " ".join(filter(None, [_operation(entry), shapes, types]))
