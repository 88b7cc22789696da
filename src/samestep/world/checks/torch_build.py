"""torch's build against the GPUs and their driver: CUDA's version, the GPU's architecture, NCCL, gloo."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from samestep.world import nvidia
from samestep.world.checks import Finding, LaunchInfo, fail, ok, on_each, unknown

GROUP = "environment"
IN_WORKER = True
INSTALL = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True)
class Facts:
    """torch's build and what it finds, on one machine.

    error: why torch does not import; '' where it does. cuda: the version that torch was built for; '' for a build
    without. driver: NVIDIA's; '' without one. gpus: of the driver. seen: how many torch can use. hidden: the text of
    CUDA_VISIBLE_DEVICES, None where it is not set. foreign: GPUs that this build has no code for. wanted: --device.
    """

    error: str
    torch: str = ""
    cuda: str = ""
    driver: str = ""
    gpus: int = 0
    seen: int = 0
    hidden: str | None = None
    foreign: tuple[str, ...] = ()
    nccl: str = ""
    gloo: bool = True
    wanted: str = "auto"
    nproc: int = 1


def probe(info: LaunchInfo) -> Facts:
    driver, gpus = "", 0
    with suppress(OSError):
        match = re.search(r"Kernel Module\D*(\d+[\d.]*)", (nvidia.DRIVER / "version").read_text())
        driver = match[1] if match else "unknown"
        gpus = nvidia.count()
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0]
        return Facts(f"{type(error).__name__}: {words}"[:300], driver=driver, gpus=gpus)
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = set(torch.cuda.get_arch_list()) if seen else set()
    foreign = []
    for number in range(seen):
        major, minor = torch.cuda.get_device_capability(number)
        if not any(re.fullmatch(rf"(sm|compute)_{major}\d+\w?", name) for name in known):
            foreign.append(f"{torch.cuda.get_device_name(number)} (sm_{major}{minor})")
    nccl = ""
    if seen and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    gloo = dist.is_available() and dist.is_gloo_available()
    built = (torch.__version__, torch.version.cuda or "", driver, gpus, seen, hidden, tuple(foreign), nccl, gloo)
    return Facts("", *built, wanted=info.device, nproc=info.nproc)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    if variable := re.search(r"value of ((?:TORCH|NCCL|GLOO)_[A-Z_]+)", seen.error):
        return fail(f"torch does not import: {seen.error}", f"unset {variable[1]}")
    if seen.error:
        return fail(f"torch does not import: {seen.error}", "pip install --force-reinstall --no-cache-dir torch")
    if not seen.gloo:
        return fail("this build of torch has no gloo, so ranks on CPUs cannot communicate", f"# another: {INSTALL}")
    if seen.wanted.startswith("cuda") and not seen.seen and not seen.gpus:
        said = f"--device {seen.wanted} asks for a GPU, and torch {seen.torch} sees none: no NVIDIA driver is here"
        return fail(said, "samestep run … --device cpu")
    if not seen.gpus or seen.wanted == "cpu":
        return ok(f"torch {seen.torch} {'for CUDA ' + seen.cuda if seen.cuda else 'for CPUs'}; no GPU is requested")
    has = f"this machine has {seen.gpus} GPU{'s' * (seen.gpus > 1)} (driver {seen.driver})"
    if not seen.cuda:
        return fail(f"{has}, and torch {seen.torch} is built without CUDA", f"pip install torch   # see {INSTALL}")
    if not seen.seen and seen.hidden is not None and not seen.hidden.strip("0123456789, "):
        return fail(f"{has}, and CUDA_VISIBLE_DEVICES='{seen.hidden}' hides them", "unset CUDA_VISIBLE_DEVICES")
    if not seen.seen:
        return fail(
            f"{has}, and torch {seen.torch} for CUDA {seen.cuda} can use none: the driver may be too old for it",
            f"nvidia-smi   # shows the driver's CUDA; then install torch for it: {INSTALL}",
        )
    if seen.hidden is not None and seen.nproc > seen.seen:
        said = f"CUDA_VISIBLE_DEVICES='{seen.hidden}' leaves {seen.seen} to {seen.nproc} ranks"
        return fail(f"{has}, and {said}", f"unset CUDA_VISIBLE_DEVICES   # or: --nproc {seen.seen}")
    if seen.foreign:
        return fail(f"torch {seen.torch} has no code for {', '.join(seen.foreign)}", f"# another build: {INSTALL}")
    if not seen.nccl:
        return unknown(f"{has}; this torch has no NCCL")
    return ok(f"torch {seen.torch} for CUDA {seen.cuda}, NCCL {seen.nccl}; {has}")
