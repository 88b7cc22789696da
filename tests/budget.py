"""How long tests wait for what must happen, in units of what importing torch takes here. No test measures speed by it:
a budget only ends what hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
MEASURED = "SAMESTEP_TESTS_IMPORT_S"  # environment variable


def import_s() -> float:
    """Seconds that importing torch takes here and now, at least one. Measured once for all processes of the tests."""
    if MEASURED not in os.environ:
        first = _one_import_s()
        measured = max(1.0, first if first < 4 else min(first, _one_import_s()))  # the first may have read a cold disk
        os.environ[MEASURED] = str(measured)
    return float(os.environ[MEASURED])


def _one_import_s() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def budget(imports: float = 60) -> float:
    """Seconds in which torch could be imported so many times."""
    return imports * import_s()


def deadline(imports: float = 60) -> list[str]:
    """The option --deadline of a command, in the same unit."""
    return ["--deadline", f"{budget(imports):.0f}"]


def wait_until(
    condition: Callable[[], T], otherwise: str, shown: Callable[[], object] | None = None, imports: float = 60
) -> T:
    """Waits until `condition()` is true, and returns it. Fails with `otherwise`, and what `shown()` then is."""
    until = time.monotonic() + budget(imports)
    while not (found := condition()):
        assert time.monotonic() < until, f"{otherwise}: {shown() if shown else ''}"
        time.sleep(0.02)
    return found
