"""/dev/shm, through which loader workers hand over batches, and NCCL and gloo may communicate on one machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.world.checks import GIB, MIB, Finding, LaunchInfo, fail, ok, on_each, unknown, warn

GROUP = "host"
FOLDER = "/dev/shm"
FIX = f"mount -o remount,size=8G {FOLDER}   # in a container instead: docker run --shm-size=8g, or --ipc=host"


@dataclass(frozen=True)
class Facts:
    """The size of /dev/shm, on one machine. size, free: bytes; None where there is no such folder."""

    size: int | None
    free: int | None
    nproc: int


def probe(info: LaunchInfo) -> Facts:
    try:
        usage = shutil.disk_usage(FOLDER)
    except OSError:
        return Facts(None, None, info.nproc)
    return Facts(usage.total, usage.free, info.nproc)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    if seen.size is None or seen.free is None:
        return unknown(f"there is no {FOLDER}")
    is_left = f"{FOLDER} has {seen.free / MIB:,.0f} MiB free of {seen.size / MIB:,.0f}"
    if seen.size <= 128 * MIB:  # 64 MiB is docker's default
        return fail(f"{is_left}: a loader worker that hands over a batch dies of a bus error (SIGBUS)", FIX)
    if seen.free < 64 * MIB:
        held = f"ls -lS {FOLDER} | head   # remove what no process uses"
        return fail(f"{is_left}: it is full, and a loader worker dies of a bus error (SIGBUS)", held)
    if seen.free < GIB / 2 * max(1, seen.nproc // 2):
        return warn(f"{is_left}, little for {seen.nproc} ranks with loader workers", FIX)
    return ok(is_left)
