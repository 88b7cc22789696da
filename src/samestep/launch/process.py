"""process: one plain process, no launcher at all. For engines that are one process, whatever they drive."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from samestep.launch import Plan, Shape


def plan(program: Sequence[str], shape: Shape) -> Plan:
    return Plan((sys.executable, *program))
