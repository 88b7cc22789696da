"""Where a job asks which rank it is. The reference is none, and may go another way there than a rank does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

from torch import distributed

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
    functions = {name: getattr(distributed, name) for name in FUNCTIONS}
    environment: Any = os.environ
    key_in_bytes: Callable[[str], bytes] = environment.encodekey

    def read(key: str) -> bytes:
        if sys._getframe(1).f_code.co_name == "__getitem__" and (place := _place(sys._getframe(1))):
            variables.setdefault(place, set()).add(key)
        return key_in_bytes(key)

    def asking(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def asked(*args: Any, **named: Any) -> Any:
            if (place := _place(sys._getframe(1))) and place not in places:
                places.append(place)
            return function(*args, **named)

        return asked

    environment.encodekey = read
    for name, function in functions.items():
        setattr(distributed, name, asking(function))
    try:
        yield places
    finally:
        environment.encodekey = key_in_bytes
        for name, function in functions.items():
            setattr(distributed, name, function)
        places += [place for place, keys in variables.items() if keys <= VARIABLES and place not in places]


def _place(frame: FrameType | None) -> str:
    """Returns the place of the first frame from here that is not of os.environ; empty where it is not the user's."""
    while frame and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    if not frame or not is_users_code(frame.f_code.co_filename):
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
