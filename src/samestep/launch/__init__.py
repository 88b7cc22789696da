"""How processes start. A launcher is one file with one pure function, `plan(program, shape)`: text in, text out."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from samestep.errors import UserError, nearest


@dataclass(frozen=True)
class Shape:
    """nproc: ranks to start. port: for the ranks' meeting on this machine; 0: any free one. folder: for logs."""

    nproc: int
    folder: str
    port: int = 0


@dataclass(frozen=True)
class Plan:
    """What to start: the command line, and what it adds to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class Launcher(Protocol):
    def plan(self, program: Sequence[str], shape: Shape) -> Plan:
        """program: the arguments after `python`, as in ('-m', 'samestep.worker', 'plan.json')."""


def names() -> list[str]:
    """The launchers there are: the files in launch/."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "start")


def load(name: str) -> Launcher:
    """Raises UserError, with the nearest name, when there is no such launcher."""
    if name not in names():
        raise UserError(f"there is no launcher '{name}'; {nearest(name, names())}")
    return cast(Launcher, importlib.import_module(f"samestep.launch.{name}"))
