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
    holder: the process that has it; '' where that is unknown. started_by: the launcher whose ranks would open it; ''
    for samestep's own. free: another port that is free; 0 where none is needed.
    """

    port: int
    error: str = ""
    holder: str = ""
    started_by: str = ""
    free: int = 0


def probe(info: LaunchInfo) -> Facts:
    # The ranks of an outer launcher open another port than this doctor.
    host, port = (info.ranks_host, info.ranks_port) if info.started_by else (info.master, info.port)
    try:
        if not port or not network.is_this_machine(host):
            return Facts(0)
        error = network.bind_error(host, port)
        if error is None:
            return Facts(port)
        with network.bound(host, 0) as other:
            free = int(other.getsockname()[1])
    except (UserError, OSError):  # the name is unknown: the check `master` says so
        return Facts(0)
    return Facts(port, error.strerror or str(error), network.holder_of(port), info.started_by, free)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    if seen.error:
        by = f" by {seen.holder}" if seen.holder else ", by another user's process"
        privileged = seen.error == "Permission denied"
        why = f"port {seen.port} cannot be opened ({seen.error})" if privileged else f"port {seen.port} is taken{by}"
        if seen.started_by:
            return fail(why, f"export MASTER_PORT={seen.free}   # for all ranks of {seen.started_by}")
        return fail(why, "samestep run … --port 0   # any free one; several machines: the same other port on each")
    return ok(f"port {seen.port} is free" if seen.port else "no port of this machine was named")
