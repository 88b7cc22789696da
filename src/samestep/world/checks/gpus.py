"""The GPUs, as NVML reports them: their number, modes, errors, topology, and the processes that use them already."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from samestep.world import nvidia
from samestep.world.checks import MIB, Finding, LaunchInfo, fail, ok, on_each, unknown, warn

GROUP = "gpu"


@dataclass(frozen=True)
class Gpu:
    """The state of one GPU.

    mode: the compute mode, 0: any process, 2: none, 3: one process. uncorrected: ECC errors since the driver was
    loaded. processes: those that compute on it. slowed: whether heat or power lowers its clock.
    """

    name: str
    mode: int = 0
    uncorrected: int = 0
    pending_rows: int = 0
    processes: tuple[int, ...] = ()
    used: int = 0
    slowed: bool = False


@dataclass(frozen=True)
class Facts:
    """The GPUs of one machine.

    missing: why there is nothing to say; '' where there is. unlinked: pairs of GPUs without peer-to-peer access. xid:
    lines of the kernel's log about errors of a GPU. wanted: --device.
    """

    missing: str
    gpus: tuple[Gpu, ...] = ()
    unlinked: tuple[tuple[int, int], ...] = ()
    xid: tuple[str, ...] = ()
    nproc: int = 1
    wanted: str = "auto"


def probe(info: LaunchInfo) -> Facts:
    missing, nvml, handles = nvidia.open_nvml()
    if missing:
        return Facts(missing, nproc=info.nproc, wanted=info.device)
    pairs = [
        (one, other)
        for one in range(len(handles))
        for other in range(one + 1, len(handles))
        if nvidia.query(lambda: nvml.nvmlDeviceGetP2PStatus(handles[one], handles[other], 0), 0) != 0  # noqa: B023
    ]
    gpus = tuple(_gpu(nvml, handle) for handle in handles)
    return Facts("", gpus, tuple(pairs), _xid(), info.nproc, info.device)


def _gpu(nvml: Any, handle: Any) -> Gpu:
    name = nvidia.query(lambda: nvml.nvmlDeviceGetName(handle), "GPU")
    running: list[Any] = nvidia.query(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    return Gpu(
        name.decode() if isinstance(name, bytes) else str(name),
        int(nvidia.query(lambda: nvml.nvmlDeviceGetComputeMode(handle), 0)),
        int(nvidia.query(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0), 0)),
        int(nvidia.query(lambda: nvml.nvmlDeviceGetRemappedRows(handle)[2], 0)),
        tuple(int(each.pid) for each in running),
        int(nvidia.query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used, 0)),
        bool(nvidia.query(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0) & (0x8 | 0x40 | 0x80)),
    )


def _xid() -> tuple[str, ...]:
    with suppress(OSError, subprocess.TimeoutExpired):
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5).stdout
        return tuple(re.findall(r"NVRM: (Xid .{0,100})", log)[-3:])
    return ()


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    if seen.missing or not seen.gpus or seen.wanted == "cpu":
        said = seen.missing or f"{len(seen.gpus)} GPUs; none is requested"
        if seen.missing and seen.wanted.startswith("cuda"):
            return unknown(f"{said}, and --device {seen.wanted} asks for a GPU: see the check torch_build")
        return unknown(said) if "nvidia-ml-py" in said or "NVML" in said else ok(said)
    count, findings = len(seen.gpus), list[Finding]()
    if seen.nproc > count:
        findings += fail(
            f"{seen.nproc} ranks and {count} GPU{'s' * (count > 1)}: two ranks on one GPU, which NCCL refuses",
            f"samestep run … --nproc {count}",
        )
    for number, gpu in enumerate(seen.gpus):
        findings += _one(number, gpu)
    if seen.unlinked:
        pairs = ", ".join(f"{one}-{other}" for one, other in seen.unlinked[:4])
        findings += warn(
            f"the GPUs {pairs} have no peer-to-peer access: NCCL copies through host memory",
            "nvidia-smi topo -m   # in virtual machines and containers: see ACS, IOMMU",
        )
    for line in seen.xid:
        findings += warn(f"the kernel reported an error of a GPU: {line}", "nvidia-smi -q | grep -A9 -i error")
    return findings or ok(", ".join(dict.fromkeys(gpu.name for gpu in seen.gpus)) + f", {count} in all")


def _one(number: int, gpu: Gpu) -> list[Finding]:
    findings = list[Finding]()
    who = f"GPU {number} ({gpu.name})"
    if gpu.mode == 2:
        findings += fail(
            f"{who} is in compute mode PROHIBITED: no process may use it", f"nvidia-smi -i {number} -c DEFAULT"
        )
    if gpu.mode == 3 and gpu.processes:
        findings += fail(
            f"{who} is in compute mode EXCLUSIVE_PROCESS, and process {gpu.processes[0]} has it",
            f"nvidia-smi -i {number} -c DEFAULT",
        )
    if gpu.uncorrected or gpu.pending_rows:
        findings += fail(
            f"{who} has {gpu.uncorrected} uncorrected errors of its memory, {gpu.pending_rows} rows to replace: its "
            "results cannot be trusted",
            f"nvidia-smi -i {number} -r   # after its processes have ended; if it comes back, replace the GPU",
        )
    if gpu.processes and gpu.mode != 3:
        findings += warn(
            f"{who} is used by process {', '.join(map(str, gpu.processes))} already, {gpu.used / MIB:,.0f} MiB",
            f"ps -fp {' '.join(map(str, gpu.processes))}",
        )
    if gpu.slowed:
        findings += warn(f"heat or power lowers the clock of {who}", f"nvidia-smi -i {number} -q -d PERFORMANCE")
    return findings
