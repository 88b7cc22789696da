"""The port of the rendezvous, on the machine where the ranks meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import UserError
from samestep.world import network
from samestep.world.checks import Finding, LaunchInfo, fail, ok, on_each

GROUP = "launch"


@dataclass(frozen=True)
class Facts:
    """The port of the rendezvous, on one machine.

    port: 0 where none was given, or the port is another machine's. error: why it cannot be opened; '' where it can.
    holder: the process that has it; '' where that is unknown.
    """

    port: int
    error: str = ""
    holder: str = ""


def probe(info: LaunchInfo) -> Facts:
    try:
        if not info.port or info.started_by or not network.is_this_machine(info.master):
            return Facts(0)
        error = network.bind_error(info.master, info.port)
    except (UserError, OSError):  # the name is unknown: the check `master` says so
        return Facts(0)
    if error:
        return Facts(info.port, error.strerror or str(error), network.holder_of(info.port))
    return Facts(info.port)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    if seen.error:
        by = f" by {seen.holder}" if seen.holder else ", by another user's process"
        privileged = seen.error == "Permission denied"
        why = f"port {seen.port} cannot be opened ({seen.error})" if privileged else f"port {seen.port} is taken{by}"
        return fail(why, "samestep run … --port 0   # any free one; several machines: the same other port on each")
    return ok(f"port {seen.port} is free" if seen.port else "no port of this machine was named")
