"""The counters of the machine and its GPUs: what each figure is made of, by counters that are planted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from samestep.world import gpu_use, nvidia
from samestep.world.gpu_use import Gpus, GpuUse
from samestep.world.machine_use import MachineUse, machine_use


def interface(sent: int, received: int) -> SimpleNamespace:
    return SimpleNamespace(bytes_sent=sent, bytes_recv=received)


def test_loopback_is_apart_and_waiting_for_a_disk_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    times = SimpleNamespace(user=1.0, system=2.0, nice=4.0, irq=8.0, softirq=16.0, iowait=32.0, idle=64.0, steal=128.0)
    memory = SimpleNamespace(total=1000, available=300, used=500)
    nics = {"lo": interface(5, 5), "lo0": interface(7, 7), "eth0": interface(10, 20), "lowpan1": interface(100, 200)}
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: nics)
    assert machine_use() == MachineUse(31.0, 700, received=220, sent=110, local=12)


def test_a_gpu_tells_watts_shares_and_the_memory_of_the_given_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in ((7, 100), (8, None), (9, 1000))]
    nvml: Any = SimpleNamespace(
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=4096),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: running,
        nvmlDeviceGetPowerUsage=lambda handle: 250_500,  # milliwatts
        nvmlDeviceGetTemperature=lambda handle, sensor: 61,
    )
    monkeypatch.setattr(gpu_use.nvidia, "open_nvml", lambda: ("", nvml, ["a handle"]))
    assert Gpus().use({7, 8}) == (GpuUse(0.5, 4096, 100, 250.5, 61.0),)
    del nvml.nvmlDeviceGetPowerUsage  # a GPU that does not tell it
    assert Gpus().use({7, 8}) == (GpuUse(0.5, 4096, 100, None, 61.0),)
    assert nvidia.query(lambda: 1 // 0, None) is None
