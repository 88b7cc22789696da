"""Finds NVIDIA GPUs by the driver's files, and reads what they do by NVML, for processes without torch.

NVML needs nvidia-ml-py (`pip install nvidia-ml-py`), which is not a requirement of samestep.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

DRIVER = Path("/proc/driver/nvidia")
T = TypeVar("T")


def count() -> int:
    """Counts the GPUs."""
    folder = DRIVER / "gpus"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def visible() -> int:
    """Counts the GPUs that CUDA_VISIBLE_DEVICES leaves: those before its first entry that names none."""
    gpus, given = count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None or not gpus:
        return gpus
    entries = [entry.strip() for entry in given.split(",")]
    is_one = lambda entry: entry.startswith(("GPU-", "MIG-")) or (entry.isdecimal() and int(entry) < gpus)  # noqa: E731
    return len(list(takewhile(is_one, entries)))


def open_nvml() -> tuple[str, Any, list[Any]]:
    """Opens NVML. Returns why it cannot be used ('' where it can), its module, and a handle of each GPU."""
    if not DRIVER.exists():
        return "no NVIDIA driver here", None, []
    if find_spec("pynvml") is None:
        return "an NVIDIA driver is here, and NVML is not: pip install nvidia-ml-py", None, []
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception as error:  # NVMLError has a class for each number, made at run time
        return f"NVML does not answer: {error}", None, []
    return "", pynvml, handles


def query(call: Callable[[], T], otherwise: T) -> T:
    """Returns the result of a call to NVML; `otherwise` where this GPU does not support the call."""
    try:
        return call()
    except Exception:  # as above
        return otherwise


@dataclass(frozen=True)
class GpuUse:
    """What one GPU does. None: this GPU, or its driver, does not report it.

    utilisation: the share of the driver's latest sampling period in which a kernel ran, 0 to 1; of all processes.
    memory: bytes in use, of all processes. own_memory: of the given processes. power: watts. temperature: °C.
    """

    utilisation: float | None
    memory: int | None
    own_memory: int | None
    power: float | None
    temperature: float | None


class Gpus:
    """The GPUs of this machine. missing: why NVML cannot be used; '' where they can."""

    def __init__(self) -> None:
        self.missing, self._nvml, self._handles = open_nvml()

    def __len__(self) -> int:
        return len(self._handles)

    def use(self, pids: Collection[int]) -> tuple[GpuUse, ...]:
        """Asks each GPU. pids: the processes whose memory is `own_memory`."""
        return tuple(self._one(handle, pids) for handle in self._handles)

    def _one(self, handle: Any, pids: Collection[int]) -> GpuUse:
        nvml = self._nvml
        return GpuUse(
            query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, None),
            query(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used), None),
            query(
                lambda: sum(
                    each.usedGpuMemory or 0
                    for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                    if each.pid in pids
                ),
                None,
            ),
            query(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, None),
            query(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)), None),
        )
