"""Facts of the probes of 'gpu', and what is found in them."""

from __future__ import annotations

from doctor.probes.row import Row
from samestep.doctor.probes.gpus import Gpu, Gpus

MIB, GIB = 2**20, 2**30
GPU = Gpu("NVIDIA H100 80GB HBM3")

ROWS: list[Row] = [
    ("gpus", Gpus("no driver"), "OK", "no_nvidia_driver", {}, ""),
    ("gpus", Gpus("not installed"), "UNKNOWN", "nvml_is_not_installed", {}, ""),
    ("gpus", Gpus("", (GPU, GPU), nproc=2), "OK", "gpus_are_well", {"gpus": 2}, ""),
    ("gpus", Gpus("", (GPU,), nproc=2), "FAIL", "more_ranks_than_gpus", {}, "--nproc 1"),
    ("gpus", Gpus("", (Gpu("A100", mode=2),)), "FAIL", "gpu_takes_no_process", {}, "-c DEFAULT"),
    ("gpus", Gpus("", (Gpu("A100", mode=3, processes=(7,)),)), "FAIL", "gpu_is_held_by_one_process", {}, "-c DEFAULT"),
    ("gpus", Gpus("", (Gpu("A100", uncorrected=3),)), "FAIL", "gpu_memory_has_errors", {"errors": 3}, "nvidia-smi"),
    (
        "gpus",
        Gpus("", (Gpu("A100", processes=(7, 9), used=GIB),)),
        "WARN",
        "gpu_is_used_already",
        {"pids": [7, 9]},
        "ps -fp 7 9",
    ),
    ("gpus", Gpus("", (Gpu("A100", slowed=True),)), "WARN", "gpu_clock_is_lowered", {}, "PERFORMANCE"),
    (
        "gpus",
        Gpus("", (GPU, GPU), ((0, 1),), nproc=2),
        "WARN",
        "gpus_have_no_peer_to_peer_access",
        {"pairs": ["0-1"]},
        "topo",
    ),
    (
        "gpus",
        Gpus("", (GPU,), xid=("Xid (PCI:0000:07:00): 79",)),
        "WARN",
        "kernel_reported_a_gpu_error",
        {},
        "nvidia-smi",
    ),
]
