"""The memory that is left, of the machine and of this process's control group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from samestep.world import resources
from samestep.world.checks import GIB, MIB, Finding, LaunchInfo, fail, ok, on_each, warn

GROUP = "host"
RANK = 400 * MIB  # what a process with torch and a small model takes on a CPU


@dataclass(frozen=True)
class Facts:
    """The memory of one machine.

    total, available: bytes of the machine. limit, left: bytes of the control group; None without a limit. swapped:
    bytes.
    """

    total: int
    available: int
    limit: int | None
    left: int | None
    swapped: int
    nproc: int


def probe(info: LaunchInfo) -> Facts:
    machine = psutil.virtual_memory()
    limits = resources.memory_limit(), resources.memory_left()
    return Facts(machine.total, machine.available, *limits, psutil.swap_memory().used, info.nproc)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    by_group = seen.left is not None and seen.limit is not None and seen.left < seen.available
    usable = seen.left if by_group and seen.left is not None else seen.available
    whose = "the control group's limit" if by_group else "this machine"
    total = seen.limit if by_group and seen.limit is not None else seen.total
    left = f"{usable / GIB:.1f} GiB of memory are left of {total / GIB:.1f} ({whose})"
    fit = int(usable // RANK)
    more = "" if not by_group else "; or raise the limit: docker --memory, Slurm --mem, the pod's resources.limits"
    if fit < seen.nproc:
        fix = f"samestep run … --nproc {max(1, fit)}   # as many as fit{more}"
        return fail(f"{left}, too little for {seen.nproc} ranks: the kernel will kill one (SIGKILL)", fix)
    if usable < 2.5 * RANK * seen.nproc:
        fix = f"samestep run … --nproc {max(1, seen.nproc // 2)}   # fewer{more}"
        return warn(f"{left}, little for {seen.nproc} ranks", fix)
    return ok(left)
