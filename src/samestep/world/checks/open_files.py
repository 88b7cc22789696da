"""The limit of open files (ulimit -n): each rank holds a socket to each other one, and loader workers hold files."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.world.checks import Finding, LaunchInfo, fail, ok, on_each, warn

GROUP = "host"
FEWEST = 256  # a rank that imports torch and starts two loader workers opens about a hundred
FEW = 1024


@dataclass(frozen=True)
class Facts:
    """The limits of open files, on one machine.

    soft, hard: files of one process; None: unlimited. ranks: on all machines.
    """

    soft: int | None
    hard: int | None
    ranks: int


def probe(info: LaunchInfo) -> Facts:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return Facts(soft, hard, info.nproc * info.nnodes)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    if seen.soft is None:
        return ok("open files are unlimited")
    needed = FEWEST + 4 * seen.ranks
    limit = f"a process may open {seen.soft} files (ulimit -n)"
    wanted = max(65536, 2 * needed)
    fix = f"ulimit -n {min(wanted, seen.hard or wanted)}"
    if seen.hard is not None and seen.hard < max(needed, FEW):
        fix = f"echo '* - nofile {wanted}' >> /etc/security/limits.d/99-nofile.conf   # then log in again"
    if seen.soft < needed:
        return fail(f"{limit}: too few for {seen.ranks} ranks, which fail with 'Too many open files'", fix)
    if seen.soft < FEW:
        return warn(f"{limit}: loader workers that share tensors by file descriptor may need more", fix)
    return ok(limit)
