"""Probes of what the ranks of one machine may use: cores, memory, locked memory, open files and shared memory."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.doctor.machine import LaunchInfo
from samestep.doctor.probe import GIB, MIB, Finding, MachineProbe, fail, for_each, ok, unknown, warn
from samestep.message import message
from samestep.world import resources

RANK_BYTES = 400 * MIB  # what a process with torch and a small model takes on a CPU
INFINIBAND = Path("/sys/class/infiniband")
MEMLOCK_FIX = (
    "echo '* - memlock unlimited' >> /etc/security/limits.d/99-memlock.conf   # then log in again; docker: --ulimit "
    "memlock=-1; Slurm: LimitMEMLOCK=infinity in slurmd.service"
)
FEWEST_FILES = 256  # a rank that imports torch and starts two loader workers opens about a hundred
FEW_FILES = 1024
SHARED = "/dev/shm"
SHARED_FIX = f"mount -o remount,size=8G {SHARED}   # in a container instead: docker run --shm-size=8g, or --ipc=host"


@dataclass(frozen=True)
class Cpus:
    """The cores and threads of one machine.

    cores: of the machine. usable: by the affinity. quota: by the control group, in cores; None without a limit.
    threads: the text of OMP_NUM_THREADS; '' where it is not set.
    """

    cores: int
    usable: int
    quota: float | None
    threads: str
    nproc: int


def count_cpus(info: LaunchInfo) -> Cpus:
    cores = os.cpu_count() or 1
    usable = resources.usable_cores()
    return Cpus(cores, usable, resources.cpu_limit(), os.environ.get("OMP_NUM_THREADS", ""), nproc=info.nproc)


def judge_cpus(cpus: Cpus) -> list[Finding]:
    findings, nproc = [], cpus.nproc
    if cpus.quota is not None and cpus.quota < nproc and cpus.quota < cpus.usable:
        findings += warn(
            message("control_group_allows_too_few_cores", cores=cpus.quota, nproc=nproc),
            f"docker update --cpus={nproc} CONTAINER   # Slurm: --cpus-per-task; a pod: resources.limits.cpu",
        )
    elif cpus.usable < nproc:
        is_bound = cpus.usable < cpus.cores
        fix = f"taskset -c 0-{cpus.cores - 1} samestep run …" if is_bound else f"samestep run … --nproc {cpus.usable}"
        existing = cpus.cores if is_bound else None
        findings += warn(message("ranks_share_cores", nproc=nproc, usable=cpus.usable, existing=existing), fix)
    cores = max(1, int(min(cpus.usable, cpus.quota or cpus.usable)))
    fix = f"export OMP_NUM_THREADS={max(1, cores // nproc)}"
    threads = cpus.threads.partition(",")[0].strip()
    if cpus.threads and not (threads.isdecimal() and int(threads)):
        findings += fail(message("omp_num_threads_is_no_number", value=cpus.threads), fix)
    elif threads and int(threads) * nproc > max(cores, nproc):
        findings += warn(message("threads_exceed_cores", nproc=nproc, threads=int(threads), cores=cores), fix)
    return findings or ok(message("ranks_have_cores", nproc=nproc, usable=cores, existing=cpus.cores))


@dataclass(frozen=True)
class Memory:
    """The memory of one machine.

    total, available: bytes of the machine. limit, remaining: bytes of the control group; None without a limit. swapped:
    bytes.
    """

    total: int
    available: int
    limit: int | None
    remaining: int | None
    swapped: int
    nproc: int


def read_memory(info: LaunchInfo) -> Memory:
    machine = psutil.virtual_memory()
    return Memory(
        total=machine.total,
        available=machine.available,
        limit=resources.memory_limit(),
        remaining=resources.memory_left(),
        swapped=psutil.swap_memory().used,
        nproc=info.nproc,
    )


def judge_memory(memory: Memory) -> list[Finding]:
    usable, total, whose, more = memory.available, memory.total, message("memory_of_machine"), ""
    if memory.remaining is not None and memory.limit is not None and memory.remaining < memory.available:
        usable, total, whose = memory.remaining, memory.limit, message("memory_of_control_group")
        more = "; or raise the limit: docker --memory, Slurm --mem, the pod's resources.limits"
    free_gib, total_gib, nproc = usable / GIB, total / GIB, memory.nproc
    fitting = int(usable // RANK_BYTES)
    if fitting < nproc:
        why = message(
            "memory_is_too_little_for_ranks", free_gib=free_gib, total_gib=total_gib, whose=whose, nproc=nproc
        )
        return fail(why, f"samestep run … --nproc {max(1, fitting)}   # as many as fit{more}")
    if usable < 2.5 * RANK_BYTES * nproc:
        why = message("memory_is_scarce_for_ranks", free_gib=free_gib, total_gib=total_gib, whose=whose, nproc=nproc)
        return warn(why, f"samestep run … --nproc {max(1, nproc // 2)}   # fewer{more}")
    return ok(message("memory_is_free", free_gib=free_gib, total_gib=total_gib, whose=whose))


@dataclass(frozen=True)
class LockedMemory:
    """The limit of locked memory, which InfiniBand needs: it registers the buffers that it sends.

    soft: bytes; None: unlimited. adapters: of InfiniBand or RoCE.
    """

    soft: int | None
    adapters: tuple[str, ...]


def read_locked_memory(info: LaunchInfo) -> LockedMemory:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    adapters = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    return LockedMemory(None if soft == resource.RLIM_INFINITY else soft, tuple(adapters))


def judge_locked_memory(locked: LockedMemory) -> list[Finding]:
    if locked.soft is None:
        return ok(message("locked_memory_is_unlimited"))
    mib = locked.soft / MIB
    if locked.adapters:
        return fail(message("locked_memory_is_too_little", mib=mib, adapter=locked.adapters[0]), MEMLOCK_FIX)
    return ok(message("locked_memory_is_limited", mib=mib))


@dataclass(frozen=True)
class OpenFiles:
    """The limits of open files: each rank holds a socket to each other one, and loader workers hold files.

    soft, hard: files of one process; None: unlimited. ranks: on all machines.
    """

    soft: int | None
    hard: int | None
    ranks: int


def read_open_files(info: LaunchInfo) -> OpenFiles:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return OpenFiles(soft, hard, info.nproc * info.nnodes)


def judge_open_files(files: OpenFiles) -> list[Finding]:
    if files.soft is None:
        return ok(message("open_files_are_unlimited"))
    needed = FEWEST_FILES + 4 * files.ranks
    wanted = max(65536, 2 * needed)
    fix = f"ulimit -n {min(wanted, files.hard or wanted)}"
    if files.hard is not None and files.hard < max(needed, FEW_FILES):
        fix = f"echo '* - nofile {wanted}' >> /etc/security/limits.d/99-nofile.conf   # then log in again"
    if files.soft < needed:
        return fail(message("open_files_are_too_few_for_ranks", limit=files.soft, ranks=files.ranks), fix)
    if files.soft < FEW_FILES:
        return warn(message("open_files_are_few_for_loader_workers", limit=files.soft), fix)
    return ok(message("open_files_are_limited", limit=files.soft))


@dataclass(frozen=True)
class SharedMemory:
    """The size of /dev/shm, through which loader workers hand over batches, and NCCL and gloo may communicate.

    size, free: bytes; None where there is no such folder.
    """

    size: int | None
    free: int | None
    nproc: int


def read_shared_memory(info: LaunchInfo) -> SharedMemory:
    try:
        usage = shutil.disk_usage(SHARED)
    except OSError:
        return SharedMemory(None, None, info.nproc)
    return SharedMemory(usage.total, usage.free, info.nproc)


def judge_shared_memory(shared: SharedMemory) -> list[Finding]:
    if shared.size is None or shared.free is None:
        return unknown(message("no_shared_memory", folder=SHARED))
    free_mib, mib = shared.free / MIB, shared.size / MIB
    if shared.size <= 128 * MIB:  # 64 MiB is docker's default
        return fail(message("shared_memory_is_small", folder=SHARED, free_mib=free_mib, mib=mib), SHARED_FIX)
    if shared.free < 64 * MIB:
        why = message("shared_memory_is_full", folder=SHARED, free_mib=free_mib, mib=mib)
        return fail(why, f"ls -lS {SHARED} | head   # remove what no process uses")
    if shared.free < GIB / 2 * max(1, shared.nproc // 2):
        why = message("shared_memory_is_scarce", folder=SHARED, free_mib=free_mib, mib=mib, nproc=shared.nproc)
        return warn(why, SHARED_FIX)
    return ok(message("shared_memory_is_free", folder=SHARED, free_mib=free_mib, mib=mib))


PROBES = (
    MachineProbe(name="cpus", group="host", facts=Cpus, gather=count_cpus, judge=for_each(judge_cpus)),
    MachineProbe(name="memory", group="host", facts=Memory, gather=read_memory, judge=for_each(judge_memory)),
    MachineProbe(
        name="memlock",
        group="host",
        facts=LockedMemory,
        gather=read_locked_memory,
        judge=for_each(judge_locked_memory),
    ),
    MachineProbe(
        name="open_files", group="host", facts=OpenFiles, gather=read_open_files, judge=for_each(judge_open_files)
    ),
    MachineProbe(
        name="shared_memory",
        group="host",
        facts=SharedMemory,
        gather=read_shared_memory,
        judge=for_each(judge_shared_memory),
    ),
)
