"""The machine that a rank runs on: its devices, its memory, and the facts that every record has."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from pathlib import Path

import torch

from samestep.errors import UserError
from samestep.records.inspection import MachineFacts
from samestep.world import resources


def facts(device: str, host: str | None = None, interface: str | None = None) -> MachineFacts:
    """Returns this machine's facts for the record: versions, host name, processor, cores and GPU."""
    return MachineFacts(
        python=platform.python_version(),
        torch=torch.__version__,
        host=host or platform.node(),
        processor=_processor(),
        cores=os.cpu_count() or 1,
        gpu=None if device == "cpu" else torch.cuda.get_device_name(device),
        interface=interface,
    )


def find_devices(wanted: str) -> tuple[str, ...]:
    """Returns the devices that `wanted` names: 'auto', 'cpu', 'cuda' or a list such as 'cuda:0,cuda:1'.

    Raises UserError for a device that torch does not have here.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and gpus == 0):
        return ("cpu",)
    if wanted in ("auto", "cuda"):
        if gpus == 0:
            raise UserError("--device cuda: this machine shows no CUDA device to torch; use --device cpu")
        return tuple(f"cuda:{i}" for i in range(gpus))
    devices = tuple(wanted.split(","))
    for device in devices:
        try:
            index = torch.device(device).index
            known = device == "cpu" or (device.startswith("cuda:") and index is not None and index < gpus)
        except RuntimeError:
            known = False
        if not known:
            raise UserError(f"--device {wanted}: there is no device '{device}' here; torch sees {gpus} CUDA devices")
    return devices


def set_threads(threads: int, ranks: int) -> int:
    """Sets with how many threads this process computes: `threads`, or with 0 the machine's cores divided by `ranks`.

    Returns the number. Never call it in a process that forks afterwards: libgomp's threads are not in the child.
    """
    torch.set_num_threads(threads or cores_for_each(ranks))
    return torch.get_num_threads()


def cores_for_each(ranks: int) -> int:
    """Returns the physical cores that this process may use, by its affinity and its cgroup, divided by `ranks`; at
    least 1."""
    if resources.usable_cores() < 2 * ranks:
        return 1  # without importing joblib, which takes 0.2 s
    from joblib import cpu_count

    return max(1, int(cpu_count(only_physical_cores=True)) // ranks)


def _processor() -> str:
    """Returns the processor's model name from /proc/cpuinfo, or its architecture."""
    try:
        names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether torch ran out of memory, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def synchronize(device: str) -> None:
    """Waits until a GPU has computed what was queued; on a CPU for nothing."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def peak_memory_bytes(device: str) -> int:
    """Returns the peak memory of this process so far, in bytes: the GPU's, or the machine's (resident set)."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
