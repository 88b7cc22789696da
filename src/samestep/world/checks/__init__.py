"""The doctor's checks, one module each in this folder: facts are gathered on machines, and a pure function judges."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from samestep.world.machine import Dialled, Machine

Status = Literal["OK", "UNKNOWN", "WARN", "FAIL"]
GROUPS = ("launch", "host", "environment", "variables", "gpu", "network")
F = TypeVar("F")
MIB, GIB = float(2**20), float(2**30)


@dataclass(frozen=True)
class Finding:
    """What a check found. why: one sentence. fix: the line that fixes it, to paste into a shell; '' where none is
    needed or known. machine: the name of the machine; '' for all of them."""

    status: Status
    why: str
    fix: str = ""
    machine: str = ""


@dataclass(frozen=True)
class LaunchInfo:
    """The launch that the doctor checks, as one machine's options and environment describe it. The fields are those of
    launch.Machines and of the options.

    node: this machine's number; None: the rendezvous gives it one. started_by: the outer launcher; '' without one, and
    ranks_host, ranks_port: where rank 0 of a training that it starts listens; 0: the launcher itself does, or nobody.
    contradiction: what is wrong with the launcher's variables or the options; '' for nothing. connect_error: how the
    last attempt to connect to the rendezvous ended, where the machines have not met. prefixes: with which the names of
    launchers' variables begin.
    """

    nproc: int = 2
    nnodes: int = 1
    node: int | None = None
    master: str = "127.0.0.1"
    port: int = 0
    out: str = "runs"
    job: str = ""
    device: str = "auto"
    started_by: str = ""
    ranks_host: str = ""
    ranks_port: int = 0
    contradiction: str = ""
    connect_error: Dialled | None = None
    prefixes: tuple[str, ...] = ()


class Check(Protocol):
    """The interface of a module in this folder.

    GROUP: of GROUPS. Facts: a frozen dataclass. One of the two following functions gathers it:
    probe(info): on each machine, in the command's process, which has no torch. With IN_WORKER = True it runs in a
        worker instead, where torch can be imported. Then judge(facts) is given machine -> its facts.
    measure(machines, info): on the first machine, which asks all machines. Then judge(facts) is given the facts.
        STARTS_RANKS = True: it starts processes with torch.
    judge returns at least one finding, and reads nothing but its argument.
    """

    GROUP: str
    Facts: type[Any]

    def judge(self, facts: Any) -> list[Finding]: ...


def ok(why: str) -> list[Finding]:
    return [Finding("OK", why)]


def unknown(why: str) -> list[Finding]:
    return [Finding("UNKNOWN", why)]


def warn(why: str, fix: str = "") -> list[Finding]:
    return [Finding("WARN", why, fix)]


def fail(why: str, fix: str = "") -> list[Finding]:
    return [Finding("FAIL", why, fix)]


def on_each(facts: Mapping[str, F], judge_one: Callable[[F], list[Finding]]) -> list[Finding]:
    """Judges each machine by itself, and names it in its findings."""
    return [replace(finding, machine=name) for name, seen in facts.items() for finding in judge_one(seen)]


def different(facts: Mapping[str, F], of: Callable[[F], str]) -> str:
    """Returns 'h0: 1; h1: 2' where the machines differ in what `of` returns; '' where they are alike."""
    values = {name: of(seen) for name, seen in facts.items()}
    return "; ".join(f"{name}: {value}" for name, value in values.items()) if len(set(values.values())) > 1 else ""


@cache
def names() -> tuple[str, ...]:
    """Lists the checks, the files in this folder, in the order of their groups."""
    module_names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    return tuple(sorted(module_names, key=lambda name: (GROUPS.index(load(name).GROUP), name)))


def load(name: str) -> Check:
    """Imports a check's module."""
    return cast(Check, importlib.import_module(f"samestep.world.checks.{name}"))


def is_measured(name: str) -> bool:
    """Whether the first machine gathers a check's facts, with the help of the others."""
    return hasattr(load(name), "measure")


def is_in_worker(name: str) -> bool:
    """Whether a check is probed in a worker, which has torch."""
    return getattr(load(name), "IN_WORKER", False)


def needs_torch(name: str) -> bool:
    """Whether a check starts processes that import torch, which takes seconds."""
    return is_in_worker(name) or getattr(load(name), "STARTS_RANKS", False)


def probe(name: str, info: LaunchInfo) -> Any:
    """Gathers a check's facts on this machine."""
    return cast(Any, load(name)).probe(info)


def measure(name: str, machines: tuple[Machine, ...], info: LaunchInfo) -> Any:
    """Gathers the facts of a check that asks all machines."""
    return cast(Any, load(name)).measure(machines, info)
