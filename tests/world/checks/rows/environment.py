"""Facts of the checks of the groups 'environment' and 'variables', and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from samestep.world.checks import (
    engine_packages,
    gpus,
    installation,
    interfaces,
    locale,
    torch_build,
    variables,
    versions,
)

OFF = interfaces.Interface("eth1", ("10.1.0.2",), False, 1500)
GPU = gpus.Gpu("NVIDIA H100 80GB HBM3")
VERSIONS = versions.Facts("3.11.7", "2.13.0", "2.2.6", "0.1.0 aa", "", "")
BROKEN = engine_packages.Package("lightning", "2.6.6", ">=2.4", True, "ImportError: cannot import name 'x'")
OLD = engine_packages.Package("deepspeed", "0.10.0", ">=0.19.8", False, "")

# (check, facts of one machine or of several, status, words of the sentence, words of the line that fixes it)
SEEN: list[tuple[str, Any, str, str, str]] = [
    ("locale", locale.Facts("UTF-8", "utf-8", "LANG=C.UTF-8"), "OK", "UTF-8", ""),
    ("locale", locale.Facts("ANSI_X3.4-1968", "ascii", "LC_ALL=C"), "WARN", "UnicodeDecodeError", "C.UTF-8"),
    ("versions", {"h0": VERSIONS, "h1": VERSIONS}, "OK", "torch 2.13.0", ""),
    (
        "versions",
        {"h0": replace(VERSIONS, job=versions.MISSING)},
        "FAIL",
        "the job's file is not there",
        "ls *.py",
    ),
    (
        "versions",
        {"h0": VERSIONS, "h1": versions.Facts("3.11.7", "2.12.0", "2.2.6", "0.1.0 aa", "", "")},
        "FAIL",
        "h0: 2.13.0; h1: 2.12.0",
        "torch==2.13.0",
    ),
    (
        "versions",
        {"h0": VERSIONS, "h1": versions.Facts("3.11.7", "2.13.0", "2.2.6", "0.1.0 bb", "", "")},
        "FAIL",
        "samestep is not the same",
        "samestep==0.1.0",
    ),
    (
        "versions",
        {"h0": VERSIONS, "h1": versions.Facts("3.11.7", "2.13.0", "2.2.6", "0.1.0 aa", "ff", "")},
        "FAIL",
        "the job's file",
        "scp",
    ),
    (
        "versions",
        {"h0": VERSIONS, "h1": versions.Facts("3.12.1", "2.13.0", "2.2.6", "0.1.0 aa", "", "")},
        "WARN",
        "h1: 3.12",
        "venv",
    ),
    ("installation", installation.Facts("/venv", "/venv", "/venv", ()), "OK", "/venv", ""),
    ("installation", installation.Facts("/venv", "/other", "", ()), "WARN", "/other is active", "activate"),
    ("installation", installation.Facts("/venv", "", "/usr", ()), "WARN", "that of /usr", "PATH=/venv/bin"),
    ("installation", installation.Facts("/venv", "", "", ("/w/torch.py",)), "WARN", "hides", "mv /w/torch.py"),
    (
        "installation",
        {"h0": installation.Facts("/a", "", "", ()), "h1": installation.Facts("/b", "", "", ())},
        "WARN",
        "h0: /a; h1: /b",
        "/a",
    ),
    ("torch_build", torch_build.Facts("", "2.13.0+cpu"), "OK", "for CPUs", ""),
    ("torch_build", torch_build.Facts("ImportError: libtorch"), "FAIL", "does not import", "--force-reinstall"),
    ("torch_build", torch_build.Facts("", "2.13.0+cpu", "", "550.54", 8), "FAIL", "without CUDA", "pip install torch"),
    ("torch_build", torch_build.Facts("", "2.13.0", "13.0", "470.1", 8), "FAIL", "driver may be too old", "nvidia-smi"),
    ("torch_build", torch_build.Facts("", "2.13.0", "13.0", "580.1", 8, 0, ""), "FAIL", "hides them", "unset CUDA_VIS"),
    (
        "torch_build",
        torch_build.Facts("", "2.13.0", "13.0", "580.1", 1, 1, None, ("Tesla K80 (sm_37)",)),
        "FAIL",
        "Tesla K80",
        "another build",
    ),
    ("torch_build", torch_build.Facts("", "2.13", "13.0", "580.1", 1, 1, None, (), "2.29.3"), "OK", "NCCL 2.29.3", ""),
    ("torch_build", torch_build.Facts("", "2.13.0", gloo=False), "FAIL", "no gloo", "another"),
    ("engine_packages", engine_packages.Facts(()), "OK", "besides torch", ""),
    ("engine_packages", engine_packages.Facts((BROKEN,)), "FAIL", "does not import", "--upgrade 'lightning>=2.4'"),
    ("engine_packages", engine_packages.Facts((OLD,)), "WARN", "0.10.0", "deepspeed>=0.19.8"),
    ("variables", variables.Facts({}), "OK", "no variable", ""),
    ("variables", variables.Facts({"NCCL_SOCKET_IFNAMES": "eth0"}), "WARN", "NCCL_SOCKET_IFNAME?", "NCCL_SOCKET_IFN"),
    ("variables", variables.Facts({"nccl_debug": "INFO"}), "WARN", "NCCL_DEBUG", "export NCCL_DEBUG=INFO"),
    ("variables", variables.Facts({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}), "WARN", "slows", "unset TORCH_DIST"),
    ("variables", variables.Facts({"TORCH_DISTRIBUTED_DEBUG": "on"}), "FAIL", "OFF, INFO, DETAIL", "unset TORCH_DIST"),
    ("variables", variables.Facts({"NCCL_P2P_DISABLE": "1"}), "OK", "without an NVIDIA GPU", ""),
    ("variables", variables.Facts({"NCCL_P2P_DISABLE": "1"}, True), "WARN", "NVLink", "unset NCCL_P2P_DISABLE"),
    ("variables", variables.Facts({"NCCL_IB_DISABLE": "1"}, True, True), "WARN", "not used", "unset NCCL_IB_DISABLE"),
    ("variables", variables.Facts({"NCCL_IB_DISABLE": "1"}, True, False), "OK", "without InfiniBand", ""),
    ("variables", variables.Facts({"NCCL_BLOCKING_WAIT": "1"}, True), "WARN", "is now TORCH_NCCL", "export TORCH_NCCL"),
    ("variables", variables.Facts({"GLOO_SOCKET_IFNAME": " eth0"}), "WARN", "spaces or quotes", "IFNAME=eth0"),
    ("variables", variables.Facts({"NCCL_OF_TOMORROW": "1"}), "UNKNOWN", "knows no variable", ""),
]
