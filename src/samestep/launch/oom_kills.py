"""Counts the processes that the kernel's out-of-memory killer ended in this process's control group.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), cgroup-v1/memory.html (oom_control)
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from samestep.world import resources


def kills() -> int:
    """Returns the count so far, of this process's control group or, where it has none, of the machine."""
    counts = [
        _count(path) for path in resources.cgroup_files("memory", "memory.events", "memory.oom_control", around=False)
    ]
    known = [count for count in counts if count is not None]
    return known[0] if known else _count(Path("/proc/vmstat")) or 0


def limit_bytes() -> int | None:
    """Returns the memory limit of this process's control group; None where it has none."""
    return resources.memory_limit(around=False)


def _count(path: Path) -> int | None:
    with suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        return int(match[1]) if match else None
    return None
