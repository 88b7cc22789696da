"""How processes start. A launcher is one file with one pure function, `plan(program, shape)`: text in, text out."""

from __future__ import annotations

import importlib
import pkgutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import which
from typing import Literal, Protocol, cast

from samestep.errors import UserError, nearest


@dataclass(frozen=True)
class Machines:
    """Where the ranks run and meet.

    nnodes: how many machines. node_rank: this one's number; None lets the rendezvous number them. master: the machine
    where the ranks meet, by name or address; port: there, 0: any free one. hosts: machines that mpirun starts on.
    reached: whether one launcher starts the ranks on all machines, as srun and mpirun do; else each starts its own.
    interface: for gloo and NCCL; empty: the one towards master. timeout_s: of a rank that waits for the others.
    max_restarts: how often torchrun starts all ranks again after one has died. leads: whether the master is this
    machine; own: its address towards the master. torchrun would find both by this machine's name, which need not lead
    anywhere.
    """

    nnodes: int = 1
    node_rank: int | None = None
    master: str = "127.0.0.1"
    port: int = 0
    hosts: tuple[str, ...] = ()
    reached: bool = False
    interface: str = ""
    max_restarts: int = 0
    timeout_s: float = 120.0
    leads: bool = False
    own: str = ""

    @property
    def endpoint(self) -> str:
        """master:port, an IPv6 address in brackets."""
        return f"[{self.master}]:{self.port}" if ":" in self.master else f"{self.master}:{self.port}"


@dataclass(frozen=True)
class Shape:
    """nproc: ranks to start on each machine. folder: for logs."""

    nproc: int
    folder: str
    machines: Machines = Machines()


@dataclass(frozen=True)
class Plan:
    """What to start: the command line, and what it adds to the environment.

    ends_by: the signal that ends it when we are killed; one that it can pass on, if its ranks are not its children.
    fork: the fork server that may start it, where there is one; None: it must start afresh.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ends_by: signal.Signals = signal.SIGKILL
    fork: Literal["ranks", "reference"] | None = None


class Launcher(Protocol):
    def plan(self, program: Sequence[str], shape: Shape) -> Plan:
        """program: the arguments after `python`, as in ('-m', 'samestep.worker', 'plan.json').

        Raises UserError for a shape that this launcher cannot start.
        """


def names() -> list[str]:
    """The launchers there are: the files in launchers/."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).with_name("launchers"))]))


def load(name: str) -> Launcher:
    """Raises UserError, with the nearest name, when there is no such launcher."""
    if name not in names():
        raise UserError(f"there is no launcher '{name}'; {nearest(name, names())}")
    return cast(Launcher, importlib.import_module(f"samestep.launch.launchers.{name}"))


def missing(name: str, machines: Machines, env: Mapping[str, str]) -> str | None:
    """Why the launcher cannot be used here and now, or None."""
    if name in ("spawn", "horovodrun", "fork") and machines.nnodes > 1:
        return f"{name} starts ranks on one machine; for {machines.nnodes} use torchrun, srun or mpirun"
    if name in ("srun", "mpirun") and which(name) is None:
        package = {"srun": "Slurm", "mpirun": "Open MPI (apt install openmpi-bin)"}[name]
        return f"{name} is not installed; it comes with {package}"
    if name == "srun" and "SLURM_JOB_ID" not in env:
        return "no Slurm job here; run inside salloc or sbatch, or write a batch script with samestep slurm"
    if name == "torchrun" and machines.reached and machines.nnodes > 1:
        return "torchrun must be started on each machine; srun and mpirun reach them all"
    return None
