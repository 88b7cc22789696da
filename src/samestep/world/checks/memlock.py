"""The limit of locked memory (ulimit -l), which InfiniBand needs: it registers the buffers that it sends."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep.world.checks import MIB, Finding, LaunchInfo, fail, ok, on_each

GROUP = "host"
INFINIBAND = Path("/sys/class/infiniband")
FIX = (
    "echo '* - memlock unlimited' >> /etc/security/limits.d/99-memlock.conf   # then log in again; docker: --ulimit "
    "memlock=-1; Slurm: LimitMEMLOCK=infinity in slurmd.service"
)


@dataclass(frozen=True)
class Facts:
    """The limit of locked memory, on one machine. soft: bytes; None: unlimited. adapters: of InfiniBand or RoCE."""

    soft: int | None
    adapters: tuple[str, ...]


def probe(info: LaunchInfo) -> Facts:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    return Facts(None if soft == resource.RLIM_INFINITY else soft, tuple(adapters))


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    if seen.soft is None:
        return ok("locked memory is unlimited")
    limit = f"locked memory is limited to {seen.soft / MIB:,.2f} MiB (ulimit -l)"
    if seen.adapters:
        return fail(f"{limit}: NCCL cannot register its buffers with {seen.adapters[0]}, and fails or falls back", FIX)
    return ok(f"{limit}, and only InfiniBand needs more, which is not here")
