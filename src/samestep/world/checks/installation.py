"""Which Python runs, and which `torchrun` a shell would find: another environment's often surprises."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from samestep.world.checks import Finding, LaunchInfo, different, ok, on_each, warn

GROUP = "environment"
SHADOWED = ("torch", "numpy", "random", "queue", "logging", "typing", "types", "signal", "socket", "select", "copy")


@dataclass(frozen=True)
class Facts:
    """The Python environment of one machine.

    prefix: of the Python that runs. active: VIRTUAL_ENV or CONDA_PREFIX; '' without. torchrun: the one in PATH, as the
    prefix that it belongs to; '' where there is none. shadows: files of the working folder and of PYTHONPATH that hide
    a module.
    """

    prefix: str
    active: str
    torchrun: str
    shadows: tuple[str, ...]


def probe(info: LaunchInfo) -> Facts:
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or ""
    torchrun = which("torchrun")
    folders = [Path.cwd(), *(Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry)]
    shadows = [str(folder / f"{name}.py") for folder in folders for name in SHADOWED if _hides(folder, name)]
    return Facts(
        str(Path(sys.prefix).resolve()),
        str(Path(active).resolve()) if active else "",
        _prefix_of(Path(torchrun)) if torchrun else "",
        tuple(dict.fromkeys(shadows)),
    )


def _hides(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() and not (folder / "os.py").exists()  # the standard library's own folder


def _prefix_of(script: Path) -> str:
    """Returns the prefix of the Python in a script's first line, or of the script's own folder."""
    try:
        line = script.read_bytes()[:200].split(b"\n")[0].decode(errors="replace")
    except OSError:
        line = ""
    interpreter = Path(line.removeprefix("#!").strip().split(" ")[0]) if line.startswith("#!/") else script
    inside = script if interpreter.name in ("env", "sh", "bash") else interpreter
    return str(inside.parent.parent.resolve())


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    findings = on_each(facts, _judge)
    if says := different(facts, lambda seen: seen.prefix):
        findings += warn(
            f"Python is in another place on each machine ({says}); mpirun and ssh start the first one's path on all",
            f"ln -s OTHER_PREFIX {next(iter(facts.values())).prefix}   # or one shared environment",
        )
    return findings


def _judge(seen: Facts) -> list[Finding]:
    findings = []
    if seen.active and seen.active != seen.prefix:
        findings += warn(
            f"the environment {seen.active} is active, and this Python is that of {seen.prefix}: pip installs into "
            "another one than you run",
            f"source {seen.active}/bin/activate && hash -r   # or: deactivate",
        )
    if seen.torchrun and seen.torchrun != seen.prefix:
        findings += warn(
            f"the torchrun in PATH is that of {seen.torchrun}, and this Python is that of {seen.prefix}: its ranks "
            "would import other packages",
            f"export PATH={seen.prefix}/bin:$PATH   # or: python -m torch.distributed.run",
        )
    for path in seen.shadows:
        findings += warn(
            f"{path} hides Python's module of that name from every script that runs here",
            f"mv {shlex.quote(path)} {shlex.quote(f'{path[:-3]}_.py')}",
        )
    return findings or ok(f"Python of {seen.prefix}")
