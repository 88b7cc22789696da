"""Remembers what a script asks of GPUs that is computed otherwise, and refuses what cannot be."""

from __future__ import annotations

from typing import Any, NoReturn

from samestep.errors import UserError
from samestep.message import Message, message

PARTS = {
    "nccl": message("gloo_for_nccl"),
    "autocast": message("autocast_is_off"),
    "compile": message("nothing_is_compiled"),
    "synchronised_norm": message("synchronised_norm_on_cpus"),
    "data_parallel": message("data_parallel_of_one_device"),
}
_parts: dict[str, Message] = {}  # in the order in which they came up


def note(part: str) -> None:
    """Remembers that something is computed otherwise. part: a key of PARTS, or the name of a package."""
    _parts.setdefault(part, PARTS.get(part) or message("package_for_cpus", package=part))


def described() -> Message:
    """Returns what has been computed otherwise than on GPUs."""
    return message("computed_on_cpus", parts=[*_parts.values()] or None)


class NoCpuTwin(UserError, ImportError):
    """Nothing on a CPU computes what a name stands for. A script that can do without a package catches ImportError."""


def refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raises NoCpuTwin."""
    raise NoCpuTwin(message("has_no_cpu_twin", name=name))
