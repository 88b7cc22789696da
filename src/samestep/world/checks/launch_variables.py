"""The variables that launchers set: whether they contradict each other or the options, or are left from another one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from samestep.world import RENDEZVOUS_PORT
from samestep.world.checks import Finding, LaunchInfo, fail, ok, on_each, warn

GROUP = "launch"
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Facts:
    """The launchers' environment variables, on one machine.

    contradiction: the sentence of the error; '' for none. left: the variables of RANKS and RENDEZVOUS that are set
    though no launcher has started this command. started_by: the launcher; '' without one. outer: the names of
    launchers' variables that are set.
    """

    contradiction: str
    left: Mapping[str, str] = field(default_factory=dict)
    started_by: str = ""
    outer: tuple[str, ...] = ()


def probe(info: LaunchInfo) -> Facts:
    variables = {name: os.environ[name] for name in (*RANKS, *RENDEZVOUS) if name in os.environ}
    outer = tuple(sorted(name for name in os.environ if name.startswith(info.prefixes)))
    return Facts(info.contradiction, variables if not info.started_by else {}, info.started_by, outer)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    if seen.contradiction:
        lacking = re.search(r"\(no ([A-Z]+_)", seen.contradiction)  # one of a launcher's: its others are left over
        left = [name for name in seen.outer if lacking and name.startswith(lacking[1])]
        left = left or [name for name in seen.left if name in RANKS]
        return fail(seen.contradiction, f"unset {' '.join(left)}" if left else "")
    findings = []
    port = seen.left.get("MASTER_PORT", "1")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        findings += fail(f"MASTER_PORT={port} is no port (1 to 65535)", f"export MASTER_PORT={RENDEZVOUS_PORT}")
    left = [name for name in seen.left if name in RANKS]
    if left:
        findings += warn(
            f"{' '.join(f'{name}={seen.left[name]}' for name in left)} is set, and no launcher has started this "
            "command: a script that reads them waits for ranks that nobody starts",
            f"unset {' '.join(seen.left)}",
        )
    return findings or ok(f"started by {seen.started_by}" if seen.started_by else "no launcher's variables are set")
