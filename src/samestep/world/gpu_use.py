"""What the GPUs do: utilisation, memory, power and temperature, by NVML (`pip install nvidia-ml-py`), where it is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from samestep.world import nvidia


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
        self.missing, self._nvml, self._handles = nvidia.open_nvml()

    def __len__(self) -> int:
        return len(self._handles)

    def use(self, pids: Collection[int]) -> tuple[GpuUse, ...]:
        """Asks each GPU. pids: the processes whose memory is `own_memory`."""
        return tuple(self._one(handle, pids) for handle in self._handles)

    def _one(self, handle: Any, pids: Collection[int]) -> GpuUse:
        nvml = self._nvml
        return GpuUse(
            nvidia.query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, None),
            nvidia.query(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used), None),
            nvidia.query(
                lambda: sum(
                    each.usedGpuMemory or 0
                    for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                    if each.pid in pids
                ),
                None,
            ),
            nvidia.query(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, None),
            nvidia.query(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)), None),
        )
