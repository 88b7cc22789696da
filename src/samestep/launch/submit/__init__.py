"""Writes batch scripts for Slurm and manifests for Kubernetes. Pure functions that return text."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from samestep.errors import UserError


@dataclass(frozen=True)
class Training:
    """The training of a batch script or a manifest.

    job: as for `samestep run`. nproc: ranks on each of `nnodes` machines. gpus: GPUs of each machine; 0: train on CPUs.
    settings, engine_settings: the values of --set and --set-engine. options: more arguments of `samestep run`. threads:
    of each rank; 0: one, or what the machine has.
    """

    job: str
    nnodes: int
    nproc: int
    gpus: int
    engine: str
    settings: Sequence[str] = ()
    engine_settings: Sequence[str] = ()
    options: Sequence[str] = ()
    threads: int = 0

    def __post_init__(self) -> None:
        for word in (self.job, self.engine, *self.settings, *self.engine_settings, *self.options):
            check_line("the value", word)
        if self.nnodes < 1 or self.nproc < 1:
            raise UserError(f"{self.nnodes} machines of {self.nproc} ranks: give at least one of each")
        if 0 < self.gpus < self.nproc:
            raise UserError(
                f"{self.nproc} ranks on {self.gpus} GPUs of each machine: give one rank for each GPU at most"
            )

    @property
    def name(self) -> str:
        """A name that Slurm and Kubernetes accept: at most 44 lower-case letters, digits, hyphens; a letter first."""
        stem = Path(self.job.partition(":")[0]).stem
        name = re.sub(r"[^a-z0-9]+", "-", stem.lower())[:40].strip("-") or "samestep"
        return name if name[0].isalpha() else f"job-{name}"

    def command(self) -> str:
        """Returns the arguments of `samestep run`, quoted for a shell."""
        job = f"./{self.job}" if self.job.startswith("-") else self.job  # which would be an option
        words = [job, "--engine", self.engine]
        words += [word for pair in self.settings for word in ("--set", pair)]
        words += [word for pair in self.engine_settings for word in ("--set-engine", pair)]
        words += self.options
        words += ["--threads", str(self.threads)] if self.threads else []
        words += [] if self.gpus else ["--device", "cpu"]
        words += ["--nnodes", str(self.nnodes), "--nproc", str(self.nproc)]
        return " ".join(shlex.quote(word) for word in words)


def check_line(what: str, text: str) -> None:
    """Raises UserError for a text that is more than one line, or no text: it would add lines of its own to a script.

    what: the option, for the error.
    """
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        raise UserError(
            f"{what} {text!r} holds a line break or another control character, which a script or a manifest cannot "
            "hold; leave it out"
        )


def in_quotes(text: str) -> str:
    """Returns a text in double quotes, as sbatch and YAML read it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def in_yaml(text: str) -> str:
    """Returns a text as a string of YAML, which takes no character that is not printable."""
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in in_quotes(text))


def render(template: str, **facts: object) -> str:
    """Fills in a template of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("samestep.launch.submit", "."),
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"in_quotes": in_quotes, "in_yaml": in_yaml}
    return environment.get_template(template).render(**facts)
