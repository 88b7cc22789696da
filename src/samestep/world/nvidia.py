"""Finds NVIDIA GPUs by the driver's files, and reads what they do by NVML, for processes without torch.

NVML needs nvidia-ml-py (`pip install nvidia-ml-py`), which is not a requirement of samestep.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from samestep.message import Message, message

DRIVER = Path("/proc/driver/nvidia")
T = TypeVar("T")
NoNvml = Literal["", "no driver", "not installed", "no answer"]


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


class Nvml(NamedTuple):
    """NVML. missing: why it cannot be used, '' where it can; error: its own words. handles: of each GPU."""

    missing: NoNvml = ""
    nvml: Any = None
    handles: Sequence[Any] = ()
    error: str = ""


def open_nvml() -> Nvml:
    """Opens NVML."""
    if not DRIVER.exists():
        return Nvml("no driver")
    if find_spec("pynvml") is None:
        return Nvml("not installed")
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception as error:  # NVMLError has a class for each number, made at run time
        return Nvml("no answer", error=str(error))
    return Nvml("", pynvml, handles)


def why_missing(missing: NoNvml, error: str = "") -> Message | None:
    """Returns why NVML cannot be used; None where it can."""
    match missing:
        case "no driver":
            return message("no_nvidia_driver")
        case "not installed":
            return message("nvml_is_not_installed")
        case "no answer":
            return message("nvml_does_not_answer", error=error)
        case _:
            return None


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
    """The GPUs of this machine. missing: why NVML cannot be used; '' where it can."""

    def __init__(self) -> None:
        opened = open_nvml()
        self.missing, self._nvml, self._handles = opened.missing, opened.nvml, opened.handles

    def __len__(self) -> int:
        return len(self._handles)

    def use(self, pids: Collection[int]) -> tuple[GpuUse, ...]:
        """Asks each GPU. pids: the processes whose memory is `own_memory`."""
        return tuple(self._measure(handle, pids) for handle in self._handles)

    def contexts(self) -> tuple[dict[int, int], ...]:
        """Returns, for each GPU, pid -> the bytes of the processes that hold a context on it."""
        nvml = self._nvml

        def holders(handle: Any) -> dict[int, int]:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return {int(process.pid): int(process.usedGpuMemory or 0) for process in running}

        return tuple(query(lambda handle=handle: holders(handle), {}) for handle in self._handles)  # type: ignore[misc]

    def _measure(self, handle: Any, pids: Collection[int]) -> GpuUse:
        nvml = self._nvml
        sensor = nvml.NVML_TEMPERATURE_GPU

        def own_memory() -> int:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return sum(process.usedGpuMemory or 0 for process in running if process.pid in pids)

        return GpuUse(
            utilisation=query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, None),
            memory=query(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used), None),
            own_memory=query(own_memory, None),
            power=query(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, None),
            temperature=query(lambda: float(nvml.nvmlDeviceGetTemperature(handle, sensor)), None),
        )
