"""process: one plain process, no launcher at all. For engines that are one process, whatever they drive."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from samestep.launch import Command, Machines, Shape
from samestep.world import RankVariables

STARTS = ("one",)
VARIABLES = RankVariables()
KILLED: tuple[str, ...] = ()
EXITED: tuple[str, ...] = ()


def plan(program: Sequence[str], shape: Shape) -> Command:
    # Said outright: the user's shell may still hold another launcher's RANK.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Command((sys.executable, *program), VARIABLES.environment() | alone)


def missing(machines: Machines, env: Mapping[str, str]) -> str | None:
    return None
