"""The disk of --out and of temporary files: whether it takes files, its room, and how fast it writes."""

from __future__ import annotations

import errno
import os
import shlex
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from samestep.world.checks import GIB, MIB, Finding, LaunchInfo, fail, ok, on_each, warn

GROUP = "host"
WRITTEN = 16 << 20  # bytes
BIG = "ulimit -f unlimited   # where it is refused: 'fsize' in /etc/security/limits.conf"


@dataclass(frozen=True)
class Folder:
    """The disk of one folder.

    path: the folder, or the nearest one that exists. free: bytes. nodes: how many files it can still take; None:
    unknown. mib_s: of a file that is written and synced. error: why it takes no file; '' where it does.
    """

    path: str
    free: int
    nodes: int | None
    mib_s: float
    error: str


@dataclass(frozen=True)
class Facts:
    """The disks of --out and of temporary files, on one machine.

    refused: TMPDIR, where Python can write nothing into it and uses another folder; '' otherwise.
    """

    out: Folder
    temporary: Folder
    refused: str = ""


def probe(info: LaunchInfo) -> Facts:
    used, requested = tempfile.gettempdir(), os.environ.get("TMPDIR", "")
    refused = requested if requested and os.path.abspath(requested) != used else ""
    return Facts(_folder(Path(info.out)), _folder(Path(used), written=1 << 20), refused)


def _folder(folder: Path, written: int = WRITTEN) -> Folder:
    path = folder.resolve()
    while not path.exists():
        path = path.parent
    free, nodes = 0, None
    try:
        free = psutil.disk_usage(str(path)).free
        nodes = os.statvfs(path).f_favail if os.statvfs(path).f_files else None
        with tempfile.TemporaryFile(dir=path) as file:
            began = time.monotonic()
            file.write(os.urandom(1 << 20) * (written >> 20))
            file.flush()
            os.fsync(file.fileno())
            took = time.monotonic() - began
    except OSError as error:
        return Folder(str(path), free, nodes, 0.0, errno.errorcode.get(error.errno or 0, "") + f": {error.strerror}")
    return Folder(str(path), free, nodes, written / MIB / max(took, 1e-9), "")


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    findings = _room(seen.out, "--out", "samestep run … --out /ANOTHER/DISK")
    if seen.temporary.path != seen.out.path:
        findings += _room(seen.temporary, "temporary files", "export TMPDIR=/ANOTHER/DISK")
    if seen.refused:
        findings += warn(
            f"in TMPDIR={seen.refused} no file can be made: Python takes {seen.temporary.path} instead, and other "
            "programs may fail",
            f"mkdir -p {shlex.quote(seen.refused)}   # or: export TMPDIR={shlex.quote(seen.temporary.path)}",
        )
    free = f"{seen.out.free / GIB:,.1f} GiB free"
    return findings or ok(f"{seen.out.path}: {free}, {seen.out.mib_s:,.0f} MiB/s")


def _room(seen: Folder, what: str, fix: str) -> list[Finding]:
    if seen.error.startswith("EFBIG"):
        return fail(f"{seen.path}, for {what}, takes no large file: a limit of this shell's (ulimit -f)", BIG)
    if seen.error:
        return fail(f"{seen.path}, for {what}, takes no file ({seen.error})", fix)
    if seen.nodes is not None and seen.nodes < 1000:
        return fail(f"{seen.path}, for {what}, takes {seen.nodes} more files: its inodes are used up", fix)
    if seen.free < 100 * MIB:
        return fail(f"{seen.path}, for {what}, has {seen.free / MIB:.0f} MiB left: weights will not fit", fix)
    if seen.free < GIB:
        return warn(f"{seen.path}, for {what}, has {seen.free / MIB:.0f} MiB left", fix)
    if seen.mib_s < 2:
        return warn(f"{seen.path}, for {what}, writes {seen.mib_s:.1f} MiB/s: a checkpoint will take long", fix)
    return []
