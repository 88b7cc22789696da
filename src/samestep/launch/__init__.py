"""How processes start. A launcher is a module: one file in launchers/, whose `plan` is pure: text in, text out."""

from __future__ import annotations

import importlib
import pkgutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal, Protocol, cast

from samestep.errors import UserError, nearest
from samestep.world import RankVariables

GROUP = "samestep.launchers"  # of the entry points with which other packages bring launchers
DEFAULT = "torchrun"
FORK = "fork"  # for proofs; nobody trains so


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
class Command:
    """What to start: the command line, and what it adds to the environment.

    ends_by: the signal that ends it when we are killed; one that it can pass on, if its ranks are not its children.
    fork: the fork server that may start it, where there is one; None: it must start afresh.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ends_by: signal.Signals = signal.SIGKILL
    fork: Literal["ranks", "reference"] | None = None


class Launcher(Protocol):
    """What a module in launchers/ holds.

    STARTS: the kinds of processes it starts: 'group' (a process for each device, which can form a process group), 'one'
        (one process that drives all devices), or a name that an engine asks for in its PROCESSES.
    VARIABLES: how it tells ranks their place.
    KILLED, EXITED: how its log reports a rank that a signal ended, and one that left by itself: regular expressions
        with the groups `rank`, and `number` or `word` of the signal, or `code`.
    plan(program, shape): what to start. missing(machines, env): why it cannot be used here and now, or None.

    One that people type themselves, around this command, also has:
    size_around(env): how many ranks it has started around this process; None where it has started none.
    identity(env): what tells this start from others. meeting(env, first_host, port): where its ranks meet.
    One whose ranks are no children of its own may have end(folder), which ends those that write into `folder`; and
    TELL, the environment's variables that it needs for that, which rank 0 writes there.
    """

    STARTS: tuple[str, ...]
    VARIABLES: RankVariables
    KILLED: tuple[str, ...]
    EXITED: tuple[str, ...]

    def plan(self, program: Sequence[str], shape: Shape) -> Command:
        """program: the arguments after `python`, as in ('-m', 'samestep.worker', 'plan.json').

        Raises UserError for a shape that this launcher cannot start.
        """

    def missing(self, machines: Machines, env: Mapping[str, str]) -> str | None: ...


def names() -> list[str]:
    """The launchers there are, the default first: the files in launchers/, and those that other packages bring with an
    entry point in the group `samestep.launchers`."""
    return sorted(_builtin_names() | {*_others()}, key=lambda name: (name != DEFAULT, name))


def load(name: str) -> Launcher:
    """Imports one launcher's file. Raises UserError, with the nearest name, when there is no such launcher."""
    if name in _builtin_names():
        return cast(Launcher, importlib.import_module(f"samestep.launch.launchers.{name}"))
    if name not in _others():
        raise UserError(f"there is no launcher '{name}'; {nearest(name, names())}")
    return cast(Launcher, _others()[name].load())


def able(kind: str) -> list[str]:
    """The launchers that users start processes of this kind with, the default first."""
    return [name for name in names() if kind in load(name).STARTS and name != FORK]


@cache
def _builtin_names() -> set[str]:
    return {m.name for m in pkgutil.iter_modules([str(Path(__file__).with_name("launchers"))])}


@cache
def _others() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
