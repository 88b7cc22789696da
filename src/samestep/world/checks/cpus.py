"""The cores that the ranks may use, by affinity and control group, against their number and their threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.world import resources
from samestep.world.checks import Finding, LaunchInfo, fail, ok, on_each, warn

GROUP = "host"


@dataclass(frozen=True)
class Facts:
    """The cores and threads of one machine.

    cores: of the machine. usable: by the affinity. quota: by the control group, in cores; None without a limit.
    threads: the text of OMP_NUM_THREADS; '' where it is not set.
    """

    cores: int
    usable: int
    quota: float | None
    threads: str
    nproc: int


def probe(info: LaunchInfo) -> Facts:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Facts(os.cpu_count() or 1, usable, resources.cpu_limit(), os.environ.get("OMP_NUM_THREADS", ""), info.nproc)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    findings = []
    if seen.quota is not None and seen.quota < seen.nproc and seen.quota < seen.usable:
        findings += warn(
            f"the control group allows {seen.quota:g} cores of CPU time to {seen.nproc} ranks: each is stopped for a "
            "part of every period, and all wait for the one that is",
            f"docker update --cpus={seen.nproc} CONTAINER   # Slurm: --cpus-per-task; a pod: resources.limits.cpu",
        )
    elif seen.usable < seen.nproc:
        of = f", of the {seen.cores} that the machine has" if seen.usable < seen.cores else ""
        fix = f"taskset -c 0-{seen.cores - 1} samestep run …" if of else f"samestep run … --nproc {seen.usable}"
        findings += warn(f"{seen.nproc} ranks share {seen.usable} core{'s' * (seen.usable > 1)}{of}", fix)
    cores = max(1, int(min(seen.usable, seen.quota or seen.usable)))
    each = max(1, cores // seen.nproc)
    first = seen.threads.partition(",")[0].strip()
    if seen.threads and not (first.isdecimal() and int(first)):
        findings += fail(
            f"OMP_NUM_THREADS={seen.threads} is no number of threads, and libgomp ignores it",
            f"export OMP_NUM_THREADS={each}",
        )
    elif first and int(first) * seen.nproc > max(cores, seen.nproc):
        findings += warn(
            f"OMP_NUM_THREADS={seen.threads}: {seen.nproc} ranks with {first} threads each share {cores} cores, and "
            "wait for one another",
            f"export OMP_NUM_THREADS={each}",
        )
    return findings or ok(f"{seen.nproc} rank{'s' * (seen.nproc > 1)} on {cores} of {seen.cores} cores")
