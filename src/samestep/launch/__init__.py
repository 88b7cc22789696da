"""Launchers, which start the ranks' processes: one module each in launchers/, whose `plan` is a pure function."""

from __future__ import annotations

import importlib
import math
import pkgutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from samestep.errors import UserError, nearest
from samestep.world import RankVariables, places

GROUP = "samestep.launchers"  # the entry-point group in which other packages register launchers
DEFAULT = "torchrun"
FORK = "fork"  # for proofs only, never for a training


@dataclass(frozen=True)
class Machines:
    """The machines that the ranks run on, and the address of their rendezvous.

    nnodes: the number of machines. node_rank: this machine's number; None: the rendezvous numbers them. master: the
    name or address of the rendezvous machine; port: its port, 0: any free one. hosts: the machines for mpirun.
    single_launch: True where one launcher starts the ranks on all machines, as srun and mpirun do; False where the
    command runs on each machine. interface: for gloo and NCCL; empty: the one that leads to the master. timeout_s: how
    long a rank waits for the others. max_restarts: as torchrun's. is_master: whether this machine is the master;
    local_address: this machine's address on the route to the master. torchrun would look both up by this machine's
    name, which may not resolve. min_nodes: the fewest machines that train on where others leave, and may come back; 0:
    all must stay. request_digest: of what is trained, by which a machine that comes later is recognised. exported: more
    environment variables that the ranks need, for a launcher that does not hand on all of them.
    """

    nnodes: int = 1
    node_rank: int | None = None
    master: str = "127.0.0.1"
    port: int = 0
    hosts: tuple[str, ...] = ()
    single_launch: bool = False
    interface: str = ""
    max_restarts: int = 0
    timeout_s: float = 120.0
    is_master: bool = False
    local_address: str = ""
    min_nodes: int = 0
    request_digest: str = ""
    exported: tuple[str, ...] = ()

    @property
    def endpoint(self) -> str:
        """The address of the rendezvous, master:port, with an IPv6 address in brackets."""
        return f"[{self.master}]:{self.port}" if ":" in self.master else f"{self.master}:{self.port}"


@dataclass(frozen=True)
class Shape:
    """How many ranks to start, and where. nproc: ranks on each machine. folder: for logs."""

    nproc: int
    folder: str
    machines: Machines = Machines()


@dataclass(frozen=True)
class Command:
    """A process to start: its command line, and the variables that it adds to the environment.

    ends_by: the signal that ends it when this process is killed. A launcher whose ranks are not its children needs one
    that it can forward to them. fork: the fork server that may start it; None: it needs a new interpreter.
    launchers: those that may report failed ranks in its output.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ends_by: signal.Signals = signal.SIGKILL
    fork: Literal["ranks", "reference"] | None = None
    launchers: tuple[str, ...] = ()


class Launcher(Protocol):
    """The interface of a module in launchers/.

    STARTS: the kinds of processes it starts: 'group' (a process for each device, which can form a process group), 'one'
        (one process that drives all devices), or the name that an engine has in its PROCESSES.
    VARIABLES: the environment variables that hold rank, world size, local rank, …
    KILLED, EXITED: regular expressions for the lines of its log that report a rank ended by a signal, and a rank that
        exited. Groups: `rank`, and of the signal `number`, `word` or `status` (128 + number), or `code`. A launcher
        whose report has a `word` has SIGNALS, word -> number.
    plan(program, shape): the command to start. missing(machines, env): why it is not available now, or None.

    A launcher that users start themselves, around `samestep run`, also has:
    PREFIX: of its environment variables. launched_size(env): how many ranks it has started, this process among them;
        None where it has started none. identity(env): an id of that launch.
    init_method(env, host, port): the ranks' init_method; '' for a file on this machine, which samestep names. host,
        port: of the rendezvous where MASTER_ADDR and MASTER_PORT are not set, by its rendezvous_host(env) and
        rendezvous_port(env) if it has these.
    Such a launcher may have check_launched(env, sizes), which raises UserError where its variables contradict others
    (sizes: launcher -> the ranks that it has started), and node_rank(env, nnodes), where it can start a command once on
    each machine: this machine's number, or None.
    A scheduler's launcher also has WHERE, the place to type the command in ('inside salloc or sbatch'), and
    allocated_nodes(env), allocated_ranks(env): the machines of the scheduler's job and the ranks on each, or None.
    A launcher that starts ranks on this machine alone has ONE_MACHINE = True; see only_one_machine.
    A launcher that takes options of its own has OPTIONS, the names of these fields of Machines: other launchers refuse
    them.
    A launcher whose ranks are not its children may have end(folder), which ends the ranks that write into `folder`,
    and SAVED_VARIABLES, the environment variables that identify a launch, by which `end` finds it: rank 0 saves their
    values in `folder`.
    A launcher that also starts a torchrun on each machine, which starts the ranks, has STARTS_TORCHRUN = True.
    A launcher inside of which others are started, or this command once on each machine, has ONE_ON_EACH, its options
    for one task on each of {machines} machines, or {hosts}.
    A launcher whose ranks get no signals has GETS_NO_SIGNALS = True: an interrupt ends its training at once.
    """

    STARTS: tuple[str, ...]
    VARIABLES: RankVariables
    KILLED: tuple[str, ...]
    EXITED: tuple[str, ...]

    def plan(self, program: Sequence[str], shape: Shape) -> Command:
        """Returns the command that starts the ranks.

        program: the arguments after `python`, as in ('-P', '-m', 'samestep.worker', 'plan.json'); the plan is the last.

        Raises UserError for a shape that this launcher cannot start.
        """

    def missing(self, machines: Machines, env: Mapping[str, str]) -> str | None: ...


def names() -> list[str]:
    """Lists the launchers, the default first: the files in launchers/, and the entry points of other packages in the
    group `samestep.launchers`."""
    working = {name for name in _external_launchers() if _error_of(name) is None}
    return sorted(_builtin_names() | working, key=lambda name: (name != DEFAULT, name))


def load(name: str) -> Launcher:
    """Imports a launcher's module. Raises UserError, with the nearest name, when there is no such launcher."""
    if name in _builtin_names():
        return cast(Launcher, importlib.import_module(f"samestep.launch.launchers.{name}"))
    if name not in _external_launchers():
        raise UserError(f"there is no launcher '{name}'; {nearest(name, names())}")
    if error := _error_of(name):
        raise UserError(f"the launcher '{name}' of another package does not import: {error}")
    return cast(Launcher, _external_launchers()[name].load())


def launchers_for(kind: str) -> list[str]:
    """Lists the launchers that start processes of this kind, the default first; fork is not for users."""
    return [name for name in names() if kind in load(name).STARTS and name != FORK]


def launchers_with(option: str) -> list[str]:
    """Lists the launchers that have `option`, a field of Machines, in their OPTIONS."""
    return [name for name in names() if option in getattr(load(name), "OPTIONS", ())]


def only_one_machine(name: str, machines: Machines) -> str | None:
    """Returns why a launcher for one machine cannot start ranks on several, with those that can; None for one."""
    if machines.nnodes == 1:
        return None
    kinds, several = load(name).STARTS, [each for each in names() if not hasattr(load(each), "ONE_MACHINE")]
    can = [each for each in several if kinds[0] in load(each).STARTS]
    instead = f"use {' or '.join(can)}" if can else "use another engine"
    return f"{name} starts ranks on one machine; for {machines.nnodes} {instead}"


def launchers_having(function: str) -> dict[str, Any]:
    """Returns the launchers that have an optional function or constant of Launcher: name -> its value."""
    modules = {name: load(name) for name in names()}
    return {name: getattr(module, function) for name, module in modules.items() if hasattr(module, function)}


def tasks_of(name: str, env: Mapping[str, str]) -> tuple[int, int]:
    """Returns on how many machines a launcher has started tasks, and how many on the first one."""
    variables = load(name).VARIABLES
    _, size, _, local_size, _ = places({**env, variables.node: "0", **variables.environment()})
    return math.ceil(size / local_size), local_size


def one_task_on_each(name: str, machines: int) -> str:
    """Returns a launcher's options that start one task on each of `machines`."""
    hosts = ",".join(f"h{number}:1" for number in range(1, machines + 1))
    options: str = load(name).ONE_ON_EACH  # type: ignore[attr-defined]  # of those that start others
    return f"{name} {options.format(machines=machines, hosts=hosts)}"


@cache
def _error_of(name: str) -> str | None:
    """Returns why another package's launcher cannot be used; a broken one must not break the rest."""
    try:
        module = _external_launchers()[name].load()
        absent = [
            part for part in ("STARTS", "VARIABLES", "KILLED", "EXITED", "plan", "missing") if not hasattr(module, part)
        ]
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return f"it has no {absent[0]}" if absent else None


@cache
def _builtin_names() -> set[str]:
    return {m.name for m in pkgutil.iter_modules([str(Path(__file__).with_name("launchers"))])}


@cache
def _external_launchers() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
