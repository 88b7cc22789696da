"""What the whole machine does: its processors, memory and network interfaces."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class MachineUse:
    """Counters of the whole machine, of all its processes.

    cpu_s: seconds on all processors since the machine started, idle ones and those that wait for a disk left out.
    memory: bytes in use that the kernel could not give to another process. received, sent: bytes on all interfaces of
    this network namespace but the loopback one; local: on that.
    """

    cpu_s: float
    memory: int
    received: int
    sent: int
    local: int


def machine_use() -> MachineUse:
    """Reads the counters."""
    times = psutil.cpu_times()
    busy = times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq"))
    memory = psutil.virtual_memory()
    received = sent = local = 0
    for name, counted in psutil.net_io_counters(pernic=True).items():
        if name.rstrip("0123456789") == "lo":
            local += counted.bytes_sent
        else:
            received, sent = received + counted.bytes_recv, sent + counted.bytes_sent
    return MachineUse(busy, memory.total - memory.available, received, sent, local)
