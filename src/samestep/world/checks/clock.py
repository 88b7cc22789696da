"""The machines' clocks against the first one's: logs are compared by time, and certificates and schedulers use it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.world.checks import Finding, LaunchInfo, ok
from samestep.world.machine import Machine

GROUP = "host"
SKEW_S = 1.0
TRIES = 5


@dataclass(frozen=True)
class Offset:
    """How far a machine's clock is from the first machine's.

    seconds: the machine's clock is ahead of the first one's. within_s: half of the fastest question and answer.
    """

    machine: str
    seconds: float
    within_s: float


@dataclass(frozen=True)
class Facts:
    offsets: tuple[Offset, ...]


def measure(machines: Sequence[Machine], info: LaunchInfo) -> Facts:
    return Facts(tuple(_offset(machine) for machine in machines[1:]))


def _offset(machine: Machine) -> Offset:
    tries = []
    for _ in range(TRIES):
        began = time.time()
        theirs = machine.now()
        ended = time.time()
        tries.append(Offset(machine.name, theirs - (began + ended) / 2, (ended - began) / 2))
    return min(tries, key=lambda each: each.within_s)


def judge(seen: Facts) -> list[Finding]:
    findings = []
    for each in seen.offsets:
        if abs(each.seconds) - each.within_s > SKEW_S:
            way = "ahead of" if each.seconds > 0 else "behind"
            said = f"its clock is {abs(each.seconds):.1f} s {way} the first machine's: times in logs do not compare"
            findings.append(Finding("WARN", said, "timedatectl set-ntp true   # or: chronyc makestep", each.machine))
    most = max((abs(each.seconds) for each in seen.offsets), default=0.0)
    return findings or ok(f"the clocks agree within {1000 * most:.0f} ms" if seen.offsets else "one machine, one clock")
