"""The probe of the GPUs, by NVML: their number, modes, errors, topology, and the processes that use them already."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from samestep.doctor.machine import LaunchInfo
from samestep.doctor.probe import MIB, Finding, MachineProbe, fail, for_each, ok, unknown, warn
from samestep.message import Message, message
from samestep.world import nvidia
from samestep.world.nvidia import NoNvml

PROHIBITED, EXCLUSIVE = 2, 3  # NVML's compute modes
HEAT_OR_POWER = 0x8 | 0x40 | 0x80  # NVML's reasons of a lower clock


@dataclass(frozen=True)
class Gpu:
    """The state of one GPU.

    mode: the compute mode, 0: any process, 2: none, 3: one process. uncorrected: ECC errors since the driver was
    loaded. processes: those that compute on it. used: bytes of its memory. slowed: whether heat or power lowers its
    clock.
    """

    name: str
    mode: int = 0
    uncorrected: int = 0
    pending_rows: int = 0
    processes: tuple[int, ...] = ()
    used: int = 0
    slowed: bool = False


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one machine.

    missing, error: why there is nothing to say; '' where there is. unlinked: pairs of GPUs without peer-to-peer access.
    xid: lines of the kernel's log about errors of a GPU. wanted: --device.
    """

    missing: NoNvml
    gpus: tuple[Gpu, ...] = ()
    unlinked: tuple[tuple[int, int], ...] = ()
    xid: tuple[str, ...] = ()
    nproc: int = 1
    wanted: str = "auto"
    error: str = ""


def read_gpus(info: LaunchInfo) -> Gpus:
    opened = nvidia.open_nvml()
    if opened.missing:
        return Gpus(opened.missing, nproc=info.nproc, wanted=info.device, error=opened.error)
    nvml, handles = opened.nvml, opened.handles
    pairs = [
        (first, second)
        for first in range(len(handles))
        for second in range(first + 1, len(handles))
        if nvidia.query(lambda: nvml.nvmlDeviceGetP2PStatus(handles[first], handles[second], 0), 0) != 0  # noqa: B023
    ]
    return Gpus(
        missing="",
        gpus=tuple(_read_gpu(nvml, handle) for handle in handles),
        unlinked=tuple(pairs),
        xid=_read_xid(),
        nproc=info.nproc,
        wanted=info.device,
    )


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    name = nvidia.query(lambda: nvml.nvmlDeviceGetName(handle), "GPU")
    running: list[Any] = nvidia.query(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    reasons = nvidia.query(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
    return Gpu(
        name=name.decode() if isinstance(name, bytes) else str(name),
        mode=int(nvidia.query(lambda: nvml.nvmlDeviceGetComputeMode(handle), 0)),
        uncorrected=int(nvidia.query(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0), 0)),
        pending_rows=int(nvidia.query(lambda: nvml.nvmlDeviceGetRemappedRows(handle)[2], 0)),
        processes=tuple(int(process.pid) for process in running),
        used=int(nvidia.query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used, 0)),
        slowed=bool(reasons & HEAT_OR_POWER),
    )


def _read_xid() -> tuple[str, ...]:
    with suppress(OSError, subprocess.TimeoutExpired):
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5).stdout
        return tuple(re.findall(r"NVRM: (Xid .{0,100})", log)[-3:])
    return ()


def judge_gpus(facts: Gpus) -> list[Finding]:
    count, findings = len(facts.gpus), list[Finding]()
    if missing := nvidia.why_missing(facts.missing, facts.error):
        return _judge_missing(facts, missing)
    if not count or facts.wanted == "cpu":
        return ok(message("no_gpu_is_requested", gpus=count))
    if facts.nproc > count:
        why = message("more_ranks_than_gpus", nproc=facts.nproc, gpus=count)
        findings += fail(why, f"samestep run … --nproc {count}")
    for number, gpu in enumerate(facts.gpus):
        findings += _judge_gpu(number, gpu)
    if facts.unlinked:
        pairs = [f"{first}-{second}" for first, second in facts.unlinked]
        fix = "nvidia-smi topo -m   # in virtual machines and containers: see ACS, IOMMU"
        findings += warn(message("gpus_have_no_peer_to_peer_access", pairs=pairs), fix)
    for line in facts.xid:
        findings += warn(message("kernel_reported_a_gpu_error", line=line), "nvidia-smi -q | grep -A9 -i error")
    return findings or ok(message("gpus_are_well", names=[*dict.fromkeys(gpu.name for gpu in facts.gpus)], gpus=count))


def _judge_missing(facts: Gpus, missing: Message) -> list[Finding]:
    if facts.wanted.startswith("cuda"):
        return unknown(message("device_needs_a_gpu", device=facts.wanted, why=missing))
    return ok(missing) if facts.missing == "no driver" or facts.wanted == "cpu" else unknown(missing)


def _judge_gpu(number: int, gpu: Gpu) -> list[Finding]:
    findings = list[Finding]()
    name, pids = gpu.name, gpu.processes
    if gpu.mode == PROHIBITED:
        why = message("gpu_takes_no_process", number=number, name=name)
        findings += fail(why, f"nvidia-smi -i {number} -c DEFAULT")
    if gpu.mode == EXCLUSIVE and pids:
        why = message("gpu_is_held_by_one_process", number=number, name=name, pid=pids[0])
        findings += fail(why, f"nvidia-smi -i {number} -c DEFAULT")
    if gpu.uncorrected or gpu.pending_rows:
        errors, rows = gpu.uncorrected, gpu.pending_rows
        why = message("gpu_memory_has_errors", number=number, name=name, errors=errors, rows=rows)
        fix = f"nvidia-smi -i {number} -r   # after its processes have ended; if it comes back, replace the GPU"
        findings += fail(why, fix)
    if pids and gpu.mode != EXCLUSIVE:
        why = message("gpu_is_used_already", number=number, name=name, pids=pids, mib=gpu.used / MIB)
        findings += warn(why, f"ps -fp {' '.join(map(str, pids))}")
    if gpu.slowed:
        why = message("gpu_clock_is_lowered", number=number, name=name)
        findings += warn(why, f"nvidia-smi -i {number} -q -d PERFORMANCE")
    return findings


PROBES = (MachineProbe(name="gpus", group="gpu", facts=Gpus, gather=read_gpus, judge=for_each(judge_gpus)),)
