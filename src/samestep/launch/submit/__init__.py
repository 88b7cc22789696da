"""Writes batch scripts for Slurm and manifests for Kubernetes. Pure functions that return text."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from samestep.errors import UserError
from samestep.world import RENDEZVOUS_PORT
from samestep.world.imports import module_arguments
from samestep.world.network import SLURM_FIRST_PORT, SLURM_PORTS


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
    return "".join(
        character if character.isprintable() else f"\\U{ord(character):08x}" for character in in_quotes(text)
    )


def render(template: str, **facts: object) -> str:
    """Fills in a template of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("samestep.launch.submit", "."),
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"in_quotes": in_quotes, "in_yaml": in_yaml}
    return environment.get_template(template).render(**facts)


KINDS = {"k8s": "kubernetes.yaml.j2", "kubeflow": "kubeflow.yaml.j2"}


def manifests(kind: str, training: Training, image: str, claim: str = "") -> str:
    """Returns YAML for `kubectl apply -f -`. kind: 'k8s' or 'kubeflow'. image: with samestep and the job.

    claim: a PersistentVolumeClaim for the results; without one they are deleted with the pods. Raises UserError for
    another kind, or without an image.
    """
    if kind not in KINDS:
        raise UserError(f"--to {kind}: manifests are written for {' and '.join(KINDS)}")
    if not image:
        raise UserError("name the container image that holds samestep and the job, as in --image registry/samestep:1")
    check_line("--image", image)
    check_line("--claim", claim)
    return render(KINDS[kind], training=training, image=image, claim=claim, port=RENDEZVOUS_PORT)


def slurm_script(training: Training, out: Path, time: str, options: Sequence[str] = ()) -> str:
    """Returns the script, with the results in `out`. time: the limit, as in '2:00:00'. options: more of sbatch's.

    Raises UserError for a value that is more than one line, or no limit.
    """
    check_line("--out", str(out))
    for option in options:
        check_line("--sbatch", option)
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", time):
        raise UserError(f"--time {time!r}: write minutes, hours:minutes:seconds or days-hours:minutes, as in 2:00:00")
    return render(
        "slurm.sh.j2",
        training=training,
        log=f"{out}/slurm-".replace("%", "%%") + "%j.out",  # sbatch replaces %j and the like, also in the folder
        time=time,
        options=options,
        samestep=shlex.join([sys.executable, *module_arguments("samestep")]),
        quoted_out=shlex.quote(str(out)),
        first_port=SLURM_FIRST_PORT,
        ports=SLURM_PORTS,
    )


def sbatch(path: Path) -> str:
    """Submits a script with sbatch, and returns the job's number. Raises UserError with sbatch's error."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise UserError(f"sbatch is not installed here; type `sbatch {path}` where Slurm is") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch does not answer; type `sbatch {path}` later") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise UserError(f"sbatch rejected {path}: {lines[-1] if lines else 'it printed no reason'}")
    return done.stdout.strip().partition(";")[0]
