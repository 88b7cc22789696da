"""Reads the limits of this process's control group, version 1 or 2, itself and those around it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 writes 'no limit' as a number near 2^63


def memory_limit(*, around: bool = True) -> int | None:
    """Returns the lowest memory limit, in bytes; None where there is none. around: also of the groups around it."""
    limits = [_number(path) for path in files("memory", "memory.max", "memory.limit_in_bytes", around=around)]
    return min((limit for limit in limits if limit is not None and limit < NO_LIMIT), default=None)


def memory_left() -> int | None:
    """Returns how many bytes are left below the lowest memory limit; None where there is none."""
    left = []
    for limit_file, used_file in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for path in files("memory", limit_file, limit_file):
            limit, used = _number(path), _number(path.with_name(used_file))
            if limit is not None and used is not None and limit < NO_LIMIT:
                left.append(limit - used + _cache(path.with_name("memory.stat")))
    return min(left, default=None)


def cpu_limit() -> float | None:
    """Returns the lowest limit of CPU time, in cores; None where there is none."""
    limits = []
    for path in files("cpu", "cpu.max", "cpu.cfs_quota_us"):
        with suppress(OSError, ValueError):
            if path.name == "cpu.max":
                quota, period = path.read_text().split()
            else:
                quota, period = path.read_text().strip(), path.with_name("cpu.cfs_period_us").read_text().strip()
            if quota not in ("max", "-1"):
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def files(controller: str, v2_name: str, v1_name: str, *, around: bool = True) -> list[Path]:
    """Returns the file of the process's group and, with `around`, of each group around it, where there is one.

    v2_name: its name in cgroup v2; v1_name: in cgroup v1.
    """
    paths: list[Path] = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kind, group = line.split(":", 2)
            if kind and controller not in kind.split(","):
                continue
            root = ROOT / controller if kind else ROOT
            inner = root / group.lstrip("/")
            groups = [inner]
            if around:
                groups += [folder for folder in inner.parents if folder == root or root in folder.parents]
            paths += [folder / (v1_name if kind else v2_name) for folder in groups]
    return [path for path in paths if path.exists()]


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _cache(path: Path) -> int:
    """Returns the bytes of files that the kernel would give back."""
    with suppress(OSError, ValueError):
        values = dict(line.split() for line in path.read_text().splitlines())
        return int(values.get("total_inactive_file") or values.get("inactive_file") or 0)
    return 0
