"""What recording costs: the time of the calls that record."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Timed:
    """Adds up how long the functions take that are called through it. seconds: their sum."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, timed."""

        def wrapper(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - began

        return wrapper
