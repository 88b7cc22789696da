"""process: one plain process, no launcher at all. For engines that are one process, whatever they drive."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samestep.launch import Plan, Shape


def plan(program: Sequence[str], shape: Shape) -> Plan:
    # Said outright: the user's shell may still hold another launcher's RANK.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Plan((sys.executable, *program), {"SAMESTEP_STARTED_BY": "torchrun", **alone})
