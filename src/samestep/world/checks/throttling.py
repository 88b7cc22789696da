"""The processor's clock: whether it is throttled by heat, or kept low by its governor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.world.checks import Finding, LaunchInfo, ok, on_each, unknown, warn

GROUP = "host"
CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Facts:
    """The clocks of one machine's cores.

    now_mhz, most_mhz: of the slowest core; 0: unknown. throttled: how often the hottest core was, since the machine
    started; None: unknown. governors: of all cores.
    """

    now_mhz: float
    most_mhz: float
    throttled: int | None
    governors: tuple[str, ...]


def probe(info: LaunchInfo) -> Facts:
    frequencies = []
    with suppress(OSError, NotImplementedError, AttributeError):
        frequencies = [each for each in psutil.cpu_freq(percpu=True) if each.max]
    slowest = min(frequencies, key=lambda each: each.current / each.max, default=None)
    counts = []
    for path in CPUS.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        with suppress(OSError, ValueError):
            counts.append(int(path.read_text()))
    governors = set()
    for path in CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor"):
        with suppress(OSError):
            governors.add(path.read_text().strip())
    now, most = (slowest.current, slowest.max) if slowest else (0.0, 0.0)
    return Facts(now, most, max(counts, default=None), tuple(sorted(governors)))


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    findings = []
    if seen.throttled:
        findings += warn(
            f"heat has throttled a core {seen.throttled} times since this machine started: its ranks will be slow, and "
            "all wait for them",
            "sensors; journalctl -k | grep -i thermal   # then see to its cooling",
        )
    if "powersave" in seen.governors and seen.most_mhz and seen.now_mhz < 0.5 * seen.most_mhz:
        findings += warn(
            f"a core runs at {seen.now_mhz:.0f} of {seen.most_mhz:.0f} MHz under the governor powersave",
            "cpupower frequency-set -g performance",
        )
    if findings:
        return findings
    if seen.throttled is None and not seen.most_mhz:
        return unknown("this machine does not report its processor's clock, as virtual ones often do not")
    return ok(f"not throttled; {seen.now_mhz:.0f} of {seen.most_mhz:.0f} MHz" if seen.most_mhz else "not throttled")
