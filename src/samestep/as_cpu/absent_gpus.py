"""Tells whether a script fails because it asks for GPUs that this machine does not have."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

from samestep.rank.hooks import Hooks, called_by_torch

OF_GPUS = re.compile("cuda|nccl|gpu|nvidia|accelerator", re.IGNORECASE)
# Packages of GPU kernels that gpu_packages.py stands for.
KERNELS = ("apex", "flash_attn", "xformers", "bitsandbytes", "triton")
ASKING = ("is_available", "device_count", "_lazy_init")


class AbsentGpus:
    """What a script asks of GPUs, on a machine that has none."""

    def __init__(self) -> None:
        self._are_absent = self._asked = False

    def attach(self, hooks: Hooks) -> None:
        """Notices when the script asks for GPUs, where there are none."""
        self._are_absent = not torch.cuda.is_available()
        if not self._are_absent:
            return
        for name in ASKING:
            hooks.attach(torch.cuda, name, self._ask)
        for name in ("is_available", "device_count", "current_accelerator"):
            hooks.attach(torch.accelerator, name, self._ask)
        hooks.attach(dist, "is_nccl_available", self._ask)

    def _ask(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        self._asked = self._asked or not called_by_torch()
        return call(*args, **kwargs)

    def explain(self, error: BaseException | None, steps: int) -> bool:
        """Returns whether GPUs are what a script lacks. error: with which it ended; steps: optimizer steps before."""
        if not self._are_absent:
            return False
        if error is None:
            return self._asked and not steps
        is_kernel = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in KERNELS
        return is_kernel or bool(OF_GPUS.search(str(error))) or (self._asked and not steps)
