"""The init_method of ranks that an outer launcher has started without a store for torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from samestep.errors import UserError
from samestep.world import RankVariables


def tcp_init_method(host: str, port: str | int) -> str:
    """Returns 'tcp://host:port', with an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def rendezvous_of(init_method: str, env: Mapping[str, str]) -> tuple[str, int]:
    """Returns (host, port) of an init_method: 'tcp://host:port', or of MASTER_ADDR and MASTER_PORT for others."""
    at = urlsplit(init_method)
    if at.scheme == "tcp" and at.hostname and at.port:
        return at.hostname, at.port
    return env["MASTER_ADDR"], int(env["MASTER_PORT"])


def user_init_method(launcher: str, env: Mapping[str, str], names: RankVariables, example: str) -> str:
    """Returns the init_method of MASTER_ADDR and MASTER_PORT; '' where all ranks are on one machine, which use a file.

    Raises UserError where the ranks are on several machines and the two variables are not set.
    """
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return tcp_init_method(env["MASTER_ADDR"], env["MASTER_PORT"])
    if int(env[names.local_size]) == int(env[names.size]):
        return ""
    raise UserError(
        f"{launcher} sets no rendezvous address for ranks on several machines; name rank 0's machine, as in {example}"
    )
