"""Counts the processes that the kernel's out-of-memory killer ended in this process's control group.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), cgroup-v1/memory.html (oom_control)
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def kills() -> int:
    """Returns the count so far, of this process's control group or, where it has none, of the machine."""
    counts = [_count(path) for path in _files("memory.events", "memory.oom_control")]
    known = [count for count in counts if count is not None]
    return known[0] if known else _count(Path("/proc/vmstat")) or 0


def limit_bytes() -> int | None:
    """Returns the memory limit of this process's control group; None where it has none."""
    for path in _files("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int(path.read_text())
            if limit < 1 << 60:  # cgroup v1 writes 'no limit' as a number near 2^63
                return limit
    return None


def _files(v2_name: str, v1_name: str) -> list[Path]:
    """Returns the control group's file that exists: `v2_name` is its name in cgroup v2, `v1_name` in cgroup v1."""
    with suppress(OSError):
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        named = [ROOT / "memory" / path.lstrip("/") / v1_name for _, kind, path in groups if kind == "memory"]
        named += [ROOT / path.lstrip("/") / v2_name for _, kind, path in groups if kind == ""]
        return [path for path in named if path.exists()]
    return []


def _count(path: Path) -> int | None:
    with suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        return int(match[1]) if match else None
    return None
