"""What others start for us, as text: a batch script for Slurm, manifests for Kubernetes. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2


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

    @property
    def name(self) -> str:
        """A name that Slurm and Kubernetes take: small letters, digits and hyphens, at most 40."""
        stem = Path(self.job.partition(":")[0]).stem
        return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "samestep"

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
        loader=jinja2.PackageLoader("samestep.submit", "."),
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["quoted"] = lambda text: '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
    return environment.get_template(template).render(**facts)
