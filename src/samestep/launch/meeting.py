"""Where ranks meet that somebody's launcher has started, when that has no store of its own for torch."""

from __future__ import annotations

from collections.abc import Mapping

from samestep.errors import UserError
from samestep.world import RankVariables


def address(host: str, port: str | int) -> str:
    """'tcp://host:port', an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def named_meeting(launcher: str, env: Mapping[str, str], names: RankVariables, example: str) -> str:
    """The address that the user has named; '' where all ranks are on one machine, and a file will do.

    Raises UserError where they are on several and none is named.
    """
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return address(env["MASTER_ADDR"], env["MASTER_PORT"])
    if int(env[names.local_size]) == int(env[names.size]):
        return ""
    raise UserError(
        f"{launcher} does not tell its ranks on several machines where to meet; name rank 0's machine, as in {example}"
    )
