"""The versions of Python, torch and samestep, and the job's file: they must be the same on all machines."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from samestep.version import __version__
from samestep.world.checks import Finding, LaunchInfo, different, fail, ok, warn

GROUP = "environment"
MISSING = "missing"


@dataclass(frozen=True)
class Facts:
    """The versions and the job's file, on one machine.

    samestep: version and digest of its files. job: digest of the job's file; '' for a built-in job, MISSING for a file
    that is not there. nvidia: versions of the packages of CUDA and NCCL; '' without them.
    """

    python: str
    torch: str
    numpy: str
    samestep: str
    job: str
    nvidia: str


def probe(info: LaunchInfo) -> Facts:
    nccl = [f"{name} {version_of(name)}" for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if version_of(name)]
    return Facts(
        python=platform.python_version(),
        torch=version_of("torch"),
        numpy=version_of("numpy"),
        samestep=f"{__version__} {_digest(sorted(Path(__file__).parents[2].rglob('*.py')))}",
        job=_job(info.job),
        nvidia=", ".join(nccl),
    )


def _job(named: str) -> str:
    job = Path(named.partition(":")[0])
    if job.is_file():
        return _digest([job])
    return MISSING if job.suffix == ".py" or len(job.parts) > 1 else ""


def version_of(package: str) -> str:
    """Returns the version of an installed package; '' where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(files: list[Path]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for path in files:
        state.update(path.read_bytes())
    return state.hexdigest()


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    first = next(iter(facts.values()))
    findings = [
        Finding("FAIL", "the job's file is not there", "ls *.py   # from this folder: the job's path", machine=machine)
        for machine, seen in facts.items()
        if seen.job == MISSING
    ]
    for name, of, fix in (
        ("torch", lambda seen: seen.torch, f"pip install torch=={first.torch}"),
        ("samestep", lambda seen: seen.samestep, f"pip install samestep=={first.samestep.partition(' ')[0]}"),
        ("the job's file", lambda seen: seen.job, "scp JOB.py OTHER:   # the same file on each machine"),
        ("NCCL", lambda seen: seen.nvidia, f"pip install torch=={first.torch}"),
    ):
        if says := different(facts, of):
            findings += fail(f"{name} is not the same on all machines ({says}): their ranks would not agree", fix)
    for name, of, fix in (
        ("Python", lambda seen: seen.python.rpartition(".")[0], "python3 -m venv .venv   # of one version of Python"),
        ("numpy", lambda seen: seen.numpy, f"pip install numpy=={first.numpy}"),
    ):
        if says := different(facts, of):
            findings += warn(f"{name} is not the same on all machines ({says})", fix)
    return findings or ok(f"Python {first.python}, torch {first.torch}, samestep {first.samestep}")
