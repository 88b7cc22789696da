"""What a machine, its GPUs and a process tree use: what each figure is made of; what a child used that has ended."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from budget import budget
from samestep.world import nvidia, resources
from samestep.world.nvidia import Gpus, GpuUse
from samestep.world.resources import MachineUse, ProcessTree, TreeUse, machine_use

BURN_S = 0.4
# Its child takes BURN_S of CPU time, and has ended when it prints; it lives on until its input ends.
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < {BURN_S}: pass"])
print(flush=True)
sys.stdin.read()
"""


def test_a_child_that_has_ended_counts_while_its_parent_goes_on() -> None:
    """Its counters are then with its parent, which nobody has waited for yet."""
    tree = ProcessTree()
    line = [sys.executable, "-S", "-c", PARENT]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout and parent.stdout.readline()
        used, alive = tree.use(), tree.pids()
        assert parent.pid in alive
        assert 0.97 * BURN_S <= used.cpu_s <= BURN_S + budget(1)  # two interpreters start, too
    ended = tree.use()
    assert used.cpu_s <= ended.cpu_s <= used.cpu_s + budget(1), "counted twice, once the parent has ended as well"
    assert parent.pid not in tree.pids()


def test_what_children_read_and_wrote_that_have_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ProcessTree()
    before = resources._rusage()
    ended = TreeUse(0, before.cpu_s + 3.0, 0, before.read + 512, before.written + 1024)
    monkeypatch.setattr(resources, "_rusage", lambda: ended)
    used = tree.use()
    assert (used.read, used.written, used.readable) == (512, 1024, True)
    assert used.cpu_s == pytest.approx(3.0)


def test_disk_counters_that_another_user_keeps_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    line = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(line, stdin=subprocess.PIPE) as child:
        tree = ProcessTree()
        assert tree.use().readable
        monkeypatch.setattr(psutil.Process, "io_counters", refused)
        used = tree.use()
        assert child.pid in tree.pids() and used.processes and not used.readable


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
    monkeypatch.setattr(nvidia, "open_nvml", lambda: nvidia.Nvml("", nvml, ["a handle"]))
    assert Gpus().use({7, 8}) == (GpuUse(0.5, 4096, 100, 250.5, 61.0),)
    del nvml.nvmlDeviceGetPowerUsage  # a GPU that does not tell it
    assert Gpus().use({7, 8}) == (GpuUse(0.5, 4096, 100, None, 61.0),)
    assert nvidia.query(lambda: 1 // 0, None) is None
