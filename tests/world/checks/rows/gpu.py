"""Facts of the checks of the group 'gpu', and what is said of them."""

from __future__ import annotations

from typing import Any

from samestep.world.checks import gpus

MIB, GIB = 2**20, 2**30
GPU = gpus.Gpu("NVIDIA H100 80GB HBM3")

# (check, facts of one machine or of several, status, words of the sentence, words of the line that fixes it)
SEEN: list[tuple[str, Any, str, str, str]] = [
    ("gpus", gpus.Facts("no NVIDIA driver here"), "OK", "no NVIDIA driver", ""),
    ("gpus", gpus.Facts("an NVIDIA driver is here, and NVML is not: pip install nvidia-ml-py"), "UNKNOWN", "NVML", ""),
    ("gpus", gpus.Facts("", (GPU, GPU), nproc=2), "OK", "2 in all", ""),
    ("gpus", gpus.Facts("", (GPU,), nproc=2), "FAIL", "two ranks on one GPU", "--nproc 1"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", mode=2),)), "FAIL", "PROHIBITED", "-c DEFAULT"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", mode=3, processes=(7,)),)), "FAIL", "EXCLUSIVE", "-c DEFAULT"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", uncorrected=3),)), "FAIL", "3 uncorrected", "nvidia-smi"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", processes=(7, 9), used=GIB),)), "WARN", "7, 9 already", "ps -fp 7 9"),
    ("gpus", gpus.Facts("", (gpus.Gpu("A100", slowed=True),)), "WARN", "lowers the clock", "PERFORMANCE"),
    ("gpus", gpus.Facts("", (GPU, GPU), ((0, 1),), nproc=2), "WARN", "0-1 have no peer-to-peer", "topo"),
    ("gpus", gpus.Facts("", (GPU,), xid=("Xid (PCI:0000:07:00): 79",)), "WARN", "79", "nvidia-smi"),
]
