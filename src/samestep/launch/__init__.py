"""Launchers, which start the ranks' processes: one module each in launchers/, whose `plan` is a pure function."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from samestep.errors import UserError, nearest_name
from samestep.message import Message, message
from samestep.world import RankVariables, places
from samestep.world.foreign_code import as_exceptions, error_line
from samestep.world.plug_ins import PlugIns

T = TypeVar("T")
GROUP = "samestep.launchers"  # the entry-point group in which other packages register launchers
DEFAULT = "torchrun"
FORK = "fork"  # for proofs only, never for a training
THREADS = "threads"  # in the place of a launcher's name: the ranks are threads of one process; for proofs only


@dataclass(frozen=True)
class Machines:
    """The machines that the ranks run on, and the address of their rendezvous."""

    nnodes: int = 1
    """The number of machines; the most machines where `min_nodes` is set."""

    node_rank: int | None = None
    """The number of this machine, from 0. None: the rendezvous numbers the machines."""

    master: str = "127.0.0.1"
    """The name or address of the rendezvous machine."""

    port: int = 0
    """The port of the rendezvous on `master`. 0: any free port."""

    hosts: tuple[str, ...] = ()
    """The names of the machines on which mpirun starts ranks. Empty: none are given."""

    single_launch: bool = False
    """True if one launcher starts the ranks on all machines, as srun and mpirun do. False if the command runs on each
    machine."""

    interface: str = ""
    """The network interface for gloo and NCCL. '': the one that leads to `master`."""

    max_restarts: int = 0
    """How often the ranks are restarted after a failure, as torchrun's --max-restarts."""

    timeout_s: float = 120.0
    """How many seconds a rank waits for the others."""

    is_master: bool = False
    """Whether this machine is `master`. torchrun would look this up by this machine's name, which may not resolve."""

    local_address: str = ""
    """The address of this machine on the route to `master`. '': torchrun looks it up by this machine's name, which may
    not resolve."""

    min_nodes: int = 0
    """The fewest machines that continue the training when others leave, and may come back. 0: all must stay."""

    request_digest: str = ""
    """A digest of what is trained, by which a machine that comes later is recognised. '': not set."""

    exported: tuple[str, ...] = ()
    """Further environment variables that the ranks need, for a launcher that does not hand on all of them."""

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
    """A process to start."""

    argv: tuple[str, ...]
    """The command line."""

    env: Mapping[str, str] = field(default_factory=dict)
    """The variables that are added to the environment."""

    ends_by: signal.Signals = signal.SIGKILL
    """The signal that ends the process when the process that has started it is killed. A launcher whose ranks are not
    its children needs a signal that it can forward to them."""

    fork: Literal["ranks", "reference"] | None = None
    """The fork server that may start the process. None: the process needs a new interpreter."""

    preloads: tuple[str, ...] = ()
    """The modules that the fork server has imported besides torch."""

    launchers: tuple[str, ...] = ()
    """The names of the launchers that may report failed ranks in the output of the process."""


Env = Mapping[str, str]  # environment variables


@dataclass(frozen=True)
class FailureReport:
    """How a launcher's log reports ranks that failed: regular expressions.

    killed: for a rank that a signal ended, with the groups `rank`, and of the signal `number`, `word` (a key of
    `signals`, whose values are numbers) or `status` (128 + number). exited: for a rank that exited, with the groups
    `rank` and `code`.
    """

    killed: tuple[str, ...] = ()
    exited: tuple[str, ...] = ()
    signals: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RankEnvironment:
    """What a process finds in its environment under a launcher that users start themselves, around `samestep run`."""

    prefix: str
    """The prefix of the names of the launcher's variables, such as 'SLURM_'."""

    launched_size: Callable[[Env], int | None]
    """Called as launched_size(env). Returns how many ranks the launcher has started, this process among them; None
    where it has started none."""

    identity: Callable[[Env], str]
    """Called as identity(env). Returns an id of that launch."""

    init_method: Callable[[Env, str, int], str]
    """Called as init_method(env, host, port), with the address of the rendezvous. Returns the ranks' init_method; ''
    for a file on this machine, which samestep names."""

    rendezvous_host: Callable[[Env], str] = field(default=lambda env: "")
    """Called as rendezvous_host(env) where MASTER_ADDR is not set. Returns the host of the rendezvous; '' where it is
    unknown."""

    rendezvous_port: Callable[[Env], int] = field(default=lambda env: 0)
    """Called as rendezvous_port(env) where MASTER_PORT is not set. Returns the port of the rendezvous; 0 where it is
    unknown."""

    check_launched: Callable[[Env, Mapping[str, int]], None] = field(default=lambda env, sizes: None)
    """Called as check_launched(env, sizes). Raises UserError if the launcher's variables contradict those of others.
    `sizes` maps a launcher's name to the number of ranks that it has started."""

    node_rank: Callable[[Env, int | None], int | None] | None = None
    """Called as node_rank(env, nnodes). Returns the number of this machine, if the launcher can start a command once on
    each machine and has done so; None otherwise. None in place of the function: the launcher cannot do that."""

    one_on_each: str = ""
    """The launcher's options that start one task on each of {machines} machines, or of {hosts}. '': the launcher starts
    no other commands."""

    starts_torchrun: bool = False
    """Whether the launcher can start a torchrun on each machine, which then starts the ranks."""


@dataclass(frozen=True)
class Scheduler:
    """The cluster scheduler inside of whose jobs a launcher starts ranks.

    where: the place to type the command in ('inside salloc or sbatch'). allocated_nodes(env), allocated_ranks(env): the
    machines of the scheduler's job and the ranks on each, or None.
    """

    where: str
    allocated_nodes: Callable[[Env], int | None]
    allocated_ranks: Callable[[Env], int | None]


@dataclass(frozen=True)
class Launcher:
    """A way to start the ranks' processes: the constant LAUNCHER of a module in launchers/, or of another package's."""

    starts: tuple[str, ...]
    """The kinds of processes that the launcher starts. 'group': a process for each device, which can form a process
    group. 'one': one process that drives all devices. Other names: those that engines have in Needs.processes."""

    variables: RankVariables
    """The names of the environment variables that hold rank, world size, local rank, local world size and node rank."""

    plan: Callable[[Sequence[str], Shape], Command]
    """Called as plan(program, shape). Returns the command to start. `program` holds the arguments after `python`, as in
    ('-P', '-m', 'samestep.worker', 'plan.json'), of which the plan is the last. Raises UserError for a shape that this
    launcher cannot start."""

    missing: Callable[[Machines, Env], Message | str | None]
    """Called as missing(machines, env). Returns why the launcher is not available now; None where it is."""

    report: FailureReport = FailureReport()
    """How the launcher's log reports ranks that failed."""

    environment: RankEnvironment | None = None
    """What a process finds in its environment under the launcher. None: users do not start it themselves."""

    scheduler: Scheduler | None = None
    """The cluster scheduler inside of whose jobs the launcher starts ranks. None: there is no scheduler."""

    one_machine: bool = False
    """True if the launcher starts ranks on this machine alone."""

    options: tuple[str, ...] = ()
    """The names of the fields of Machines that this launcher has as options, and others refuse."""

    end: Callable[[Path], None] = field(default=lambda folder: None)
    """Called as end(folder). Ends the ranks that write into `folder`, where they are not children of the launcher."""

    saved_variables: tuple[str, ...] = ()
    """The names of the variables that identify a launch, by which `end` finds it. Rank 0 saves their values in
    `folder`."""

    gets_signals: bool = True
    """False if the launcher's ranks get no signals, so that an interrupt ends its training at once."""


_LAUNCHERS = PlugIns("samestep.launch.launchers", GROUP, "LAUNCHER", Launcher)


def names() -> list[str]:
    """Lists the launchers, the default first: the files in launchers/, and the entry points of other packages in the
    group `samestep.launchers`."""
    working = {name for name in _LAUNCHERS.of_other_packages if isinstance(_load_external(name), Launcher)}
    return sorted(_LAUNCHERS.own | working, key=lambda name: (name != DEFAULT, name))


def load(name: str) -> Launcher:
    """Imports a launcher. Raises UserError, with the nearest name, when there is no such launcher."""
    if name in _LAUNCHERS.own:
        return _LAUNCHERS.load(name)
    if name not in _LAUNCHERS.of_other_packages:
        raise UserError(message("no_such_launcher", launcher=name, hint=nearest_name(name, names())))
    loaded = _load_external(name)
    if not isinstance(loaded, Launcher):
        raise UserError(message("launcher_of_another_package_cannot_be_used", launcher=name, why=loaded))
    return loaded


def all_launchers() -> dict[str, Launcher]:
    """Returns all launchers by name, the default first."""
    return {name: load(name) for name in names()}


def environments() -> dict[str, RankEnvironment]:
    """Returns the environments of the launchers that users start themselves, by the launchers' names."""
    return {name: launcher.environment for name, launcher in all_launchers().items() if launcher.environment}


def schedulers() -> dict[str, Scheduler]:
    """Returns the schedulers inside of whose jobs launchers start ranks, by the launchers' names."""
    return {name: launcher.scheduler for name, launcher in all_launchers().items() if launcher.scheduler}


def launchers_for(kind: str) -> list[str]:
    """Lists the launchers that start processes of this kind, the default first; fork is not for users."""
    return [name for name, launcher in all_launchers().items() if kind in launcher.starts and name != FORK]


def launchers_with(option: str) -> list[str]:
    """Lists the launchers that have `option`, a field of Machines, in their options."""
    return [name for name, launcher in all_launchers().items() if option in launcher.options]


def only_one_machine(name: str, machines: Machines) -> Message | None:
    """Returns why a launcher for one machine cannot start ranks on several, with those that can; None for one."""
    if machines.nnodes == 1:
        return None
    kind = load(name).starts[0]
    able = [
        candidate
        for candidate, launcher in all_launchers().items()
        if kind in launcher.starts and not launcher.one_machine
    ]
    instead = message("use_launcher", launchers=able) if able else message("use_another_engine")
    return message("launcher_starts_one_machine", launcher=name, machines=machines.nnodes, instead=instead)


def tasks_of(name: str, env: Env) -> tuple[int, int]:
    """Returns on how many machines a launcher has started tasks, and how many on the first one."""
    variables = load(name).variables
    _, size, _, local_size, _ = places({**env, variables.node: "0", **variables.environment()})
    return math.ceil(size / local_size), local_size


def one_task_on_each(name: str, machines: int) -> str:
    """Returns a launcher's options that start one task on each of `machines`."""
    hosts = ",".join(f"h{number}:1" for number in range(1, machines + 1))
    options = environments()[name].one_on_each
    return f"{name} {options.format(machines=machines, hosts=hosts)}"


@cache
def _load_external(name: str) -> Launcher | Message | str:
    """Loads another package's launcher. Returns why it cannot be used: a broken one must not break the rest."""
    try:
        launcher = _LAUNCHERS.load(name)
    except Exception as error:
        return error.message if isinstance(error, UserError) else error_line(error)
    environment, scheduler = launcher.environment, launcher.scheduler
    return replace(
        _naming(name, launcher),
        environment=environment and _naming(name, environment),
        scheduler=scheduler and _naming(name, scheduler),
    )


def _naming(name: str, held: T) -> T:
    """Returns a part of another package's launcher, each of whose functions turns what it raises into an error that
    names the launcher: every command asks all launchers whether it is inside of one."""

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                with as_exceptions():
                    return function(*arguments)
            except UserError:
                raise
            except Exception as error:
                why = error_line(error)
                said = message("launcher_of_another_package_cannot_be_used", launcher=name, why=why)
                raise UserError(said) from error

        return call

    values = {field.name: getattr(held, field.name) for field in fields(cast(Any, held))}
    functions = {field: named(value) for field, value in values.items() if callable(value)}
    return cast(T, replace(cast(Any, held), **functions))
