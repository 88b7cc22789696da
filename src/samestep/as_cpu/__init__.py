"""Lets a script that names GPUs train on CPUs, unedited: what names a CUDA device gets the CPU, and NCCL is gloo.

A function mode gives each function of torch the CPU in place of a CUDA device; replacements stand for what is no such
function: torch.cuda, what gloo lacks, SyncBatchNorm, and packages of GPU kernels. What cannot be computed on a CPU
raises UserError, which names it.
"""

from __future__ import annotations

import os

from samestep.as_cpu import cuda_module, devices, gloo_group, gpu_packages, synchronised_norm
from samestep.rank.hooks import Hooks


def attach() -> None:
    """Lets this process compute on the CPU what a script computes on GPUs, until it ends. Call it before the script."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed asks no function of torch
    hooks = Hooks()
    devices.attach(hooks)
    cuda_module.attach(hooks)
    gloo_group.attach(hooks)
    synchronised_norm.attach(hooks)
    gpu_packages.attach()
