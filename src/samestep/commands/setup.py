"""Setup: the options of a command, checked as far as possible before any process starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samestep import engine, launch
from samestep.commands.machine_options import MachineOptions
from samestep.errors import UserError
from samestep.message import Message, message
from samestep.world.mesh import Mesh

MOST_RANKS_AS_THREADS = 64  # each further thread takes time of the others: one interpreter runs one thread at a time
MOST_RANKS_PER_CORE = 64
FOREVER_S = 1e6  # the longest timeout that sockets accept


@dataclass(frozen=True)
class Resume:
    """How the trainings of an interrupted proof are continued. nproc: ranks on each machine; None: as many as began it.
    engine: '': the one that began it."""

    nproc: int | None = None
    engine: str = ""

    def __str__(self) -> str:
        return f"by {self.engine or 'the same engine'} on {self.nproc or 'as many'} ranks"


@dataclass(frozen=True)
class Setup:
    """What to train, where, and how to prove or measure it. Raises UserError for invalid values."""

    job: str = "digits"
    """The job: the name of a built-in one, file.py:function or package.module:function."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """The values of --set: name -> text."""

    engines: tuple[str, ...] = ()
    """The names of the engines. Empty: all of them."""

    engine_settings: Mapping[str, str] = field(default_factory=dict)
    """The values of --set-engine: name -> text."""

    launchers: tuple[str, ...] = ()
    """The names of the launchers, or 'all'. Empty: the first launcher of each engine."""

    nproc: int | None = None
    """Ranks on each machine. None: one for each GPU, or 2 on a CPU."""

    device: str = "auto"
    """The device of the ranks, as --device takes it: 'auto', 'cpu', 'cuda' or a list such as 'cuda:0,cuda:1'."""

    out: Path | None = None
    """The folder for the results. None: a dated one under runs/."""

    steps: int | None = None
    """Optimizer steps of each training of the proof. None: 8, or 4 if a step takes long."""

    rounds: int = 0
    """How many launches of each engine are measured. 0: the engines are proven alone."""

    warmup_steps: int = 20
    """How many of the first steps of each measured launch are discarded."""

    measured_steps: int = 100
    """How many steps of each measured launch count, after the warmup."""

    deadline_s: float | None = None
    """Seconds after which a launch is ended. None: no limit."""

    stall_s: float | None = None
    """Seconds without progress after which a hang is named and ended. 0: never. None: by the training's pace."""

    resume: Resume | None = None
    """How the proof's trainings are continued after an interruption. None: they are not interrupted."""

    as_threads: bool = False
    """Whether the ranks are threads of one process."""

    quick: bool = False
    """Whether the proof has two short trainings alone."""

    also: int | None = 0
    """The second number of ranks that is proven. None: it is chosen. 0: there is no second number."""

    proves: bool = False
    """Whether the job is proven."""

    mesh: Mesh | None = None
    """How the ranks are arranged. None: as each engine arranges them."""

    machines: MachineOptions = MachineOptions()  # noqa: RUF009 - frozen
    """The machines that train, and their rendezvous."""

    def __post_init__(self) -> None:
        cores = os.cpu_count() or 1
        resumed, also = self.resume.nproc if self.resume else None, self.also or None  # 0: none is asked for
        for flag, nproc in (("--nproc", self.nproc), ("--resume-nproc", resumed), ("--also", also)):
            if nproc is not None:
                check_rank_number(flag, nproc, as_threads=self.as_threads)
        threads = self.machines.threads
        if threads is not None and not 1 <= threads <= 64 * cores:
            raise UserError(f"--threads {threads}: give 1 to {64 * cores}; this machine has {cores} cores")
        if self.mesh and self.machines.min_nnodes:
            raise UserError(message("mesh_of_leaving_machines", mesh=str(self.mesh), nnodes=self.machines.nnodes))
        if self.mesh and self.nproc and not self.machines.hosts:
            self.mesh.check_ranks(self.nproc, self.machines.max_nnodes or 1)
        if self.mesh and also and not self.mesh.of_other_size((*self.mesh.sizes, "data"), also):
            raise second_size_refused(also, "second_size_is_no_mesh")
        for name in (*self.engines, *([self.resume.engine] if self.resume and self.resume.engine else ())):
            engine.check(name)
        for name in self.launchers:
            if name != "all":
                launch.load(name)
        for option, seconds in (
            ("timeout", self.machines.timeout_s),
            ("deadline", self.deadline_s),
            ("stall", self.stall_s),
        ):
            if seconds is not None and not seconds < FOREVER_S:
                raise UserError(f"--{option} {seconds:g}: give at most {FOREVER_S:.0f} seconds")


def check_rank_number(flag: str, ranks: int, *, as_threads: bool = False) -> None:
    """Raises UserError for other numbers of ranks than one machine can start. flag: the option that gives it."""
    cores = os.cpu_count() or 1
    if ranks < 1:
        raise UserError(message("rank_number_too_small", flag=flag, ranks=ranks))
    if ranks > MOST_RANKS_PER_CORE * cores:
        raise UserError(message("rank_number_too_large", flag=flag, ranks=ranks, cores=cores))
    if as_threads and ranks > MOST_RANKS_AS_THREADS:
        raise UserError(message("too_many_ranks_as_threads", flag=flag, ranks=ranks, most=MOST_RANKS_AS_THREADS))


def second_size_refused(also: int | str, hint: str) -> UserError:
    """Returns the error of a --also that cannot be taken. hint: the id of the message that says what may be given."""
    return UserError(message("option_has_no_such_value", flag="--also", value=also, hint=Message(hint)))
