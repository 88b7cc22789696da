"""What others start for us, as text: a batch script for Slurm, manifests for Kubernetes. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from samestep.errors import UserError


@dataclass(frozen=True)
class Training:
    """What `samestep run` is to train.

    job: as `samestep run` takes it. nproc: ranks on each of `nnodes` machines. gpus: of each machine, for its ranks; 0
    trains on CPUs. settings, engine_settings: of --set and --set-engine.
    """

    job: str
    nnodes: int
    nproc: int
    gpus: int
    engine: str = "ddp"
    settings: Sequence[str] = ()
    engine_settings: Sequence[str] = ()
    options: Sequence[str] = ()  # more of `samestep run`'s own

    def __post_init__(self) -> None:
        if self.nnodes < 1 or self.nproc < 1:
            raise UserError(f"{self.nnodes} machines of {self.nproc} ranks: give at least one of each")
        if 0 < self.gpus < self.nproc:
            raise UserError(
                f"{self.nproc} ranks on {self.gpus} GPUs of each machine: give one rank for each GPU at most"
            )

    @property
    def name(self) -> str:
        """A name that Slurm and Kubernetes take: a small letter, then such, digits and hyphens; at most 44."""
        stem = Path(self.job.partition(":")[0]).stem
        name = re.sub(r"[^a-z0-9]+", "-", stem.lower())[:40].strip("-") or "samestep"
        return name if name[0].isalpha() else f"job-{name}"

    def command(self) -> str:
        """The arguments of `samestep run`, quoted for a shell."""
        words = [self.job, "--engine", self.engine]
        words += [word for pair in self.settings for word in ("--set", pair)]
        words += [word for pair in self.engine_settings for word in ("--set-engine", pair)]
        words += self.options
        words += [] if self.gpus else ["--device", "cpu"]
        words += ["--nnodes", str(self.nnodes), "--nproc", str(self.nproc)]
        return " ".join(shlex.quote(word) for word in words)


def render(template: str, **facts: object) -> str:
    """A template of this folder, filled in."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("samestep.launch.submit", "."),
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["quoted"] = lambda text: '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return environment.get_template(template).render(**facts)
