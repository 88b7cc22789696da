"""Finds the lines where a job asks for its rank. The reference has no rank, and may take another branch there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import distributed

from samestep.rank.hooks import Hooks, calling_frame
from samestep.world.imports import is_users_code

VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
FUNCTIONS = "is_initialized", "get_rank", "get_world_size"  # of torch.distributed


@contextmanager
def asked_ranks() -> Iterator[list[str]]:
    """Yields a list that holds, after the block, the places (as in job.py:12) at which the user's code has asked
    os.environ or torch.distributed for its rank, or for the number of ranks."""
    places: list[str] = []
    # Of each place of the user's code, the variables that it has read: what reads others, too, copies them.
    variables: dict[str, set[str]] = {}
    hooks = Hooks()

    def read(key_in_bytes: Any, key: str) -> Any:
        frame = calling_frame()
        if frame.f_code.co_name == "__getitem__" and (place := _place(frame)):
            variables.setdefault(place, set()).add(key)
        return key_in_bytes(key)

    def asked(function: Any, *args: Any, **named: Any) -> Any:
        if (place := _place(calling_frame())) and place not in places:
            places.append(place)
        return function(*args, **named)

    hooks.attach(os.environ, "encodekey", read)
    for name in FUNCTIONS:
        hooks.attach(distributed, name, asked)
    try:
        yield places
    finally:
        hooks.detach()
        places += [place for place, keys in variables.items() if keys <= VARIABLES and place not in places]


def _place(frame: FrameType | None) -> str:
    """Returns the place of the first frame from here that is not of os.environ; empty where it is not the user's."""
    while frame and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    if not frame or not is_users_code(frame.f_code.co_filename):
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
