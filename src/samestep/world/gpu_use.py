"""What the GPUs do: utilisation, memory, power and temperature, by NVML (`pip install nvidia-ml-py`), where it is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

from samestep.world import nvidia

T = TypeVar("T")


@dataclass(frozen=True)
class GpuUse:
    """What one GPU does. None: this GPU, or its driver, does not tell.

    utilisation: the share of the driver's latest sampling period in which a kernel ran, 0 to 1; of all processes.
    memory: bytes in use, of all processes. own_memory: of the given processes. power: watts. temperature: °C.
    """

    utilisation: float | None
    memory: int | None
    own_memory: int | None
    power: float | None
    temperature: float | None


class Gpus:
    """The GPUs of this machine. missing: why they cannot be asked; '' where they can."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self.missing = self._open()

    def _open(self) -> str:
        if not nvidia.DRIVER.exists():
            return "no NVIDIA driver here"
        if find_spec("pynvml") is None:
            return "an NVIDIA driver is here, and NVML is not: pip install nvidia-ml-py"
        import pynvml

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception as error:  # NVMLError has a class for each number, made at run time
            return f"NVML does not answer: {error}"
        return ""

    def __len__(self) -> int:
        return len(self._handles)

    def use(self, pids: Collection[int]) -> tuple[GpuUse, ...]:
        """Asks each GPU. pids: the processes whose memory is `own_memory`."""
        return tuple(self._one(handle, pids) for handle in self._handles)

    def _one(self, handle: Any, pids: Collection[int]) -> GpuUse:
        nvml = self._nvml
        return GpuUse(
            _asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            _asked(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            _asked(
                lambda: sum(
                    each.usedGpuMemory or 0
                    for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                    if each.pid in pids
                )
            ),
            _asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            _asked(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        )


def _asked(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Exception:  # as above
        return None
