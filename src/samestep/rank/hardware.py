"""What a rank runs on: the facts that every record carries, and its memory."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch


def facts(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    gpu = None if device == "cpu" else torch.cuda.get_device_name(device)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": platform.node(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
    }


def _processor() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    try:
        names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def peak_memory_bytes(device: str) -> int:
    """The most that this process has ever held: of the GPU's memory, or of the machine's."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
