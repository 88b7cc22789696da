"""process: one plain process, without a launcher. For engines that use one process, however many devices it drives."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from samestep.launch import Command, Launcher, Machines, Shape
from samestep.message import Message
from samestep.world import RankVariables


def plan(program: Sequence[str], shape: Shape) -> Command:
    # Set explicitly: the user's shell may still export another launcher's RANK.
    one_process = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Command((sys.executable, *program), RankVariables().environment() | one_process)


def missing(machines: Machines, env: Mapping[str, str]) -> Message | None:
    return None


LAUNCHER = Launcher(starts=("one",), variables=RankVariables(), plan=plan, missing=missing)
