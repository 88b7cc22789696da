"""Where a job asks which rank it is. The reference is none, and may go another way there than a rank does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import distributed

from samestep.world.imports import is_users_code

VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
FUNCTIONS = "is_initialized", "get_rank", "get_world_size"  # of torch.distributed


@contextmanager
def asked_ranks() -> Iterator[list[str]]:
    """Yields a list that fills with the places (as in job.py:12) at which the user's code asks for its rank or for the
    number of ranks: os.environ, or torch.distributed by the module's name."""
    places: list[str] = []
    functions = {name: getattr(distributed, name) for name in FUNCTIONS}
    environment: Any = os.environ
    key_in_bytes: Callable[[str], bytes] = environment.encodekey

    def note() -> None:
        frame = sys._getframe(2)
        while frame.f_back and frame.f_globals.get("__name__") in ("os", "collections.abc"):
            frame = frame.f_back
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if is_users_code(frame.f_code.co_filename) and place not in places:
            places.append(place)

    def asked_for(key: str) -> bytes:
        if key in VARIABLES:
            note()
        return key_in_bytes(key)

    def called(name: str, *args: Any, **named: Any) -> Any:
        note()
        return functions[name](*args, **named)

    environment.encodekey = asked_for
    for name in FUNCTIONS:
        setattr(distributed, name, partial(called, name))
    try:
        yield places
    finally:
        environment.encodekey = key_in_bytes
        for name, function in functions.items():
            setattr(distributed, name, function)
