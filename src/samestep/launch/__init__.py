"""Launchers, which start the ranks' processes: one module each in launchers/, whose `plan` is a pure function."""

from __future__ import annotations

import importlib
import math
import pkgutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from samestep.errors import UserError, nearest_name
from samestep.message import Message, message
from samestep.world import RankVariables, places
from samestep.world.foreign_code import as_exceptions, error_line

T = TypeVar("T")
GROUP = "samestep.launchers"  # the entry-point group in which other packages register launchers
DEFAULT = "torchrun"
FORK = "fork"  # for proofs only, never for a training
THREADS = "threads"  # in the place of a launcher's name: the ranks are threads of one process; for proofs only
CLOSE = 0.8  # how much a name must be like a member to be taken for its misspelling


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
    preloads: modules that this server has imported besides torch. launchers: those that may report failed ranks in its
    output.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ends_by: signal.Signals = signal.SIGKILL
    fork: Literal["ranks", "reference"] | None = None
    preloads: tuple[str, ...] = ()
    launchers: tuple[str, ...] = ()


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
    """What a process finds in its environment under a launcher that users start themselves, around `samestep run`.

    prefix: of the launcher's variables. launched_size(env): how many ranks it has started, this process among them;
    None where it has started none. identity(env): an id of that launch. init_method(env, host, port): the ranks'
    init_method; '' for a file on this machine, which samestep names. host, port: of the rendezvous where MASTER_ADDR
    and MASTER_PORT are not set, by rendezvous_host(env) and rendezvous_port(env). check_launched(env, sizes): raises
    UserError where its variables contradict others (sizes: launcher -> the ranks that it has started). node_rank(env,
    nnodes): where it can start a command once on each machine, this machine's number, or None. one_on_each: its options
    for one task on each of {machines} machines, or {hosts}; '' for one that starts no others. starts_torchrun: it can
    start a torchrun on each machine, which starts the ranks.
    """

    prefix: str
    launched_size: Callable[[Env], int | None]
    identity: Callable[[Env], str]
    init_method: Callable[[Env, str, int], str]
    rendezvous_host: Callable[[Env], str] = field(default=lambda env: "")
    rendezvous_port: Callable[[Env], int] = field(default=lambda env: 0)
    check_launched: Callable[[Env, Mapping[str, int]], None] = field(default=lambda env, sizes: None)
    node_rank: Callable[[Env, int | None], int | None] | None = None
    one_on_each: str = ""
    starts_torchrun: bool = False


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
    """Starts the ranks' processes: the constant LAUNCHER of a module in launchers/, or of another package's.

    starts: the kinds of processes it starts: 'group' (a process for each device, which can form a process group), 'one'
    (one process that drives all devices), or the name that an engine has in its PROCESSES. variables: the environment
    variables that hold rank, world size, local rank, … plan(program, shape): the command to start; program: the
    arguments after `python`, as in ('-P', '-m', 'samestep.worker', 'plan.json'), of which the plan is the last. It
    raises UserError for a shape that this launcher cannot start. missing(machines, env): why it is not available now,
    or None. report: of failed ranks, in its log. environment: for a launcher that users start themselves. scheduler:
    for one inside of a scheduler's jobs. one_machine: it starts ranks on this machine alone. options: the fields of
    Machines that this launcher has, and others refuse. end(folder): ends the ranks that write into `folder`, where they
    are not its children; saved_variables: those that identify a launch, by which `end` finds it: rank 0 saves their
    values in `folder`. gets_signals: False where its ranks get none: an interrupt ends its training at once.
    """

    starts: tuple[str, ...]
    variables: RankVariables
    plan: Callable[[Sequence[str], Shape], Command]
    missing: Callable[[Machines, Env], Message | str | None]
    report: FailureReport = FailureReport()
    environment: RankEnvironment | None = None
    scheduler: Scheduler | None = None
    one_machine: bool = False
    options: tuple[str, ...] = ()
    end: Callable[[Path], None] = field(default=lambda folder: None)
    saved_variables: tuple[str, ...] = ()
    gets_signals: bool = True


def names() -> list[str]:
    """Lists the launchers, the default first: the files in launchers/, and the entry points of other packages in the
    group `samestep.launchers`."""
    working = {name for name in _external_launchers() if isinstance(_load_external(name), Launcher)}
    return sorted(_builtin_names() | working, key=lambda name: (name != DEFAULT, name))


def load(name: str) -> Launcher:
    """Imports a launcher. Raises UserError, with the nearest name, when there is no such launcher."""
    if name in _builtin_names():
        launcher: Launcher = importlib.import_module(f"samestep.launch.launchers.{name}").LAUNCHER
        return launcher
    if name not in _external_launchers():
        raise UserError(message("no_such_launcher", launcher=name, hint=nearest_name(name, names())))
    loaded = _load_external(name)
    if isinstance(loaded, str):
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
def _load_external(name: str) -> Launcher | str:
    """Loads another package's launcher. Returns why it cannot be used: a broken one must not break the rest."""
    try:
        with as_exceptions():
            loaded = _external_launchers()[name].load()
            launcher = getattr(loaded, "LAUNCHER", loaded)
            launcher = launcher if isinstance(launcher, Launcher) else launcher_of_members(loaded)
    except Exception as error:
        return f"{error}" if isinstance(error, UserError) else error_line(error)
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


# Before LAUNCHER, a launcher was a module with these members: member -> field. Other packages have such modules.
_MEMBERS = {"STARTS": "starts", "VARIABLES": "variables", "plan": "plan", "missing": "missing"}
_REPORT_MEMBERS = {"KILLED": "killed", "EXITED": "exited", "SIGNALS": "signals"}
_OPTIONAL_MEMBERS = {"OPTIONS": "options", "end": "end", "SAVED_VARIABLES": "saved_variables"}
_OPTIONAL_MEMBERS |= {"ONE_MACHINE": "one_machine"}
_ENVIRONMENT_MEMBERS = {"PREFIX": "prefix", "ONE_ON_EACH": "one_on_each", "STARTS_TORCHRUN": "starts_torchrun"}
_ENVIRONMENT_MEMBERS |= {name: name for name in ("launched_size", "identity", "init_method")}
_ENVIRONMENT_MEMBERS |= {name: name for name in ("check_launched", "node_rank", "rendezvous_host", "rendezvous_port")}
_SCHEDULER_MEMBERS = {"WHERE": "where"} | {name: name for name in ("allocated_nodes", "allocated_ranks")}
_NO_SIGNALS = "GETS_NO_SIGNALS"


def launcher_of_members(module: object) -> Launcher:
    """Makes a Launcher of a module's members. Raises UserError for one that is missing, and one that is misspelt."""
    required = (*_MEMBERS, "KILLED", "EXITED")
    if absent := [name for name in required if not hasattr(module, name)]:
        raise UserError(f"it has no {absent[0]}")
    known = [*required, "SIGNALS", *_OPTIONAL_MEMBERS, *_ENVIRONMENT_MEMBERS, *_SCHEDULER_MEMBERS, _NO_SIGNALS]
    for name, value in vars(module).items():
        is_its_own = getattr(value, "__module__", None) in (None, getattr(module, "__name__", None))
        if name in known or name.startswith("_") or isinstance(value, ModuleType) or not is_its_own:
            continue
        if close := get_close_matches(name.lower(), [member.lower() for member in known], n=1, cutoff=CLOSE):
            meant = next(member for member in known if member.lower() == close[0])
            raise UserError(f"it has no member {name}; did you mean {meant}? If {name} is its own, write _{name}")

    def fields_of(members: Mapping[str, str]) -> dict[str, Any]:
        return {name: getattr(module, member) for member, name in members.items() if hasattr(module, member)}

    environment, scheduler = fields_of(_ENVIRONMENT_MEMBERS), fields_of(_SCHEDULER_MEMBERS)
    return Launcher(
        **fields_of(_MEMBERS | _OPTIONAL_MEMBERS),
        report=FailureReport(**fields_of(_REPORT_MEMBERS)),
        environment=RankEnvironment(**environment) if "prefix" in environment else None,
        scheduler=Scheduler(**scheduler) if "where" in scheduler else None,
        gets_signals=not getattr(module, _NO_SIGNALS, False),
    )


@cache
def _builtin_names() -> set[str]:
    return {module.name for module in pkgutil.iter_modules([str(Path(__file__).with_name("launchers"))])}


@cache
def _external_launchers() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
