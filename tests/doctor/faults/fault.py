"""A fault of this machine or of the doctor's environment, and the shell lines that plant it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DOCTOR = [sys.executable, "-m", "samestep", "doctor", "--json"]
SOURCE = Path(__file__).parents[3] / "src"


@dataclass(frozen=True)
class Fault:
    """A fault, the probe that finds it, and the id of what it finds.

    shell: runs the doctor, which is "$@"; $T is an empty folder. torch: whether it needs the probes with torch. fixes:
    words of the line that fixes it.
    """

    name: str
    probe: str
    finding: str
    shell: str = '"$@"'
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    torch: bool = False
    fixes: str = ""


def env(name: str, probe: str, finding: str, **variables: str) -> Fault:
    return Fault(name, probe, finding, env=variables)


def mounts(lines: str) -> str:
    """A shell line that runs the doctor with mounts of its own."""
    inner = lines + '; exec "$@"'
    return f'unshare -m -u sh -c {shlex.quote(inner)} sh "$@"'


def tmpfs(folder: str, options: str, after: str = "true") -> str:
    return mounts(f"mkdir -p {folder}; mount -t tmpfs -o {options} tmpfs {folder} && {after}")


def sys_class(state: str, physical: str) -> str:
    """InfiniBand's files, as the kernel writes them for one adapter."""
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    lines = f"mount -t tmpfs tmpfs /sys/class; mkdir -p {port}; echo '{state}' >{port}/state; "
    return mounts(lines + f"echo '{physical}' >{port}/phys_state; echo '200 Gb/sec (4X HDR)' >{port}/rate")


def grouped(controller: str, settings: str) -> str:
    """A control group of its own, version 1. settings: as in 'cpu.cfs_quota_us=50000'."""
    folder = f"/sys/fs/cgroup/{controller}/samestep-doctor"
    writes = "; ".join(
        f"echo {value} >{folder}/{name}" for name, _, value in (s.partition("=") for s in settings.split())
    )
    return f'mkdir -p {folder}; {writes}; echo $$ >{folder}/cgroup.procs; "$@"'


def clean() -> dict[str, str]:
    """This environment, without what a healthy machine would not have set."""
    begins = ("NCCL_", "GLOO_", "TORCH_", "SLURM_")
    stale = {"OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VIRTUAL_ENV"}
    usual = {name: value for name, value in os.environ.items() if not name.startswith(begins) and name not in stale}
    return usual | {"PYTHONPATH": str(SOURCE)}
