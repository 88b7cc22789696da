"""What a probe of the doctor is: it gathers facts about one machine, or about all together, and judges them.

    FREE_SPACE = MachineProbe(
        name="free_space", group="host", facts=FreeSpace, gather=measure_free_space, judge=for_each(judge_free_space)
    )

A probe is declared as a value, so a member that is missing or misspelt is an error when its module is imported.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, get_args

from samestep.doctor.machine import LaunchInfo, Machine
from samestep.errors import printable
from samestep.message import Message

Status = Literal["OK", "UNKNOWN", "WARN", "FAIL"]
Group = Literal["launch", "host", "environment", "variables", "gpu", "network"]
GROUPS: tuple[Group, ...] = get_args(Group)
F = TypeVar("F")
MIB, GIB = float(2**20), float(2**30)
LONGEST_PART = 400  # characters of a text from elsewhere in a line to paste


@dataclass(frozen=True)
class Finding:
    """What a probe found.

    why: what it is. fix: the line that fixes it, to paste into a shell; '' where none is needed or known. machine: the
    name of the machine; '' for all of them. probe, group: which found it.
    """

    status: Status
    why: Message
    fix: str = ""
    machine: str = ""
    probe: str = ""
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class MachineProbe(Generic[F]):
    """A probe that looks at each machine by itself.

    facts: a frozen dataclass. It crosses the network, so it holds no Message: a finding is made where it is reported.
    gather: called on each machine, in the command's process, which has no torch; with in_worker in a worker, where
    torch can be imported. judge: given machine -> its facts, returns at least one finding, and reads nothing else.
    """

    name: str
    group: Group
    facts: type[F]
    gather: Callable[[LaunchInfo], F]
    judge: Callable[[Mapping[str, F]], list[Finding]]
    in_worker: bool = False

    @property
    def needs_torch(self) -> bool:
        """Whether it starts processes that import torch, which takes seconds."""
        return self.in_worker


@dataclass(frozen=True, kw_only=True)
class FleetProbe(Generic[F]):
    """A probe of all machines together: the first one gathers its facts, and asks the others for help.

    facts, judge: as of MachineProbe, but for all machines at once. needs_torch: whether it starts ranks.
    """

    name: str
    group: Group
    facts: type[F]
    gather: Callable[[Sequence[Machine], LaunchInfo], F]
    judge: Callable[[F], list[Finding]]
    needs_torch: bool = False


Probe = MachineProbe[Any] | FleetProbe[Any]


def quoted(text: str) -> str:
    """Returns a text from elsewhere as a part of a line to paste: one word of the shell, and printable."""
    return shlex.quote(printable(text, LONGEST_PART))


def ok(why: Message) -> list[Finding]:
    return [Finding("OK", why)]


def unknown(why: Message) -> list[Finding]:
    return [Finding("UNKNOWN", why)]


def warn(why: Message, fix: str = "", machine: str = "") -> list[Finding]:
    return [Finding("WARN", why, printable(fix), machine)]


def fail(why: Message, fix: str = "", machine: str = "") -> list[Finding]:
    return [Finding("FAIL", why, printable(fix), machine)]


def for_each(judge_machine: Callable[[F], list[Finding]]) -> Callable[[Mapping[str, F]], list[Finding]]:
    """Returns a judge that judges each machine by itself, and names it in its findings."""

    def judge(facts: Mapping[str, F]) -> list[Finding]:
        return [
            replace(finding, machine=name) for name, gathered in facts.items() for finding in judge_machine(gathered)
        ]

    return judge


def differences(facts: Mapping[str, F], value_of: Callable[[F], object]) -> list[str]:
    """Returns ['h0: 1', 'h1: 2'] where the machines differ in a value; [] where they are alike."""
    values = {name: str(value_of(gathered)) for name, gathered in facts.items()}
    return [f"{name}: {value}" for name, value in values.items()] if len(set(values.values())) > 1 else []
