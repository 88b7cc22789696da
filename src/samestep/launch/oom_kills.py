"""The kernel's out-of-memory killer: how often it struck in this process's control group.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), cgroup-v1/memory.html (oom_control)
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def kills() -> int:
    """Processes killed for memory so far, in our control group or, where it does not count, on this machine."""
    counted = [_count(path) for path in _files("memory.events", "memory.oom_control")]
    known = [count for count in counted if count is not None]
    return known[0] if known else _count(Path("/proc/vmstat")) or 0


def limit_bytes() -> int | None:
    """The memory limit of our control group; None where it has none."""
    for path in _files("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int(path.read_text())
            if limit < 1 << 60:  # version 1 says 'no limit' with a number near 2^63
                return limit
    return None


def _files(second: str, first: str) -> list[Path]:
    """Our control group's file, by its name in version 2 and in version 1 of the kernel's interface."""
    with suppress(OSError):
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        named = [ROOT / "memory" / path.lstrip("/") / first for _, kind, path in groups if kind == "memory"]
        named += [ROOT / path.lstrip("/") / second for _, kind, path in groups if kind == ""]
        return [path for path in named if path.exists()]
    return []


def _count(path: Path) -> int | None:
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        return int(found[1]) if found else None
    return None
