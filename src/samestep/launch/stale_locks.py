"""Locks of C++ builds: a process that is killed while torch builds an extension leaves one, and all later ones wait.

DeepSpeed builds its operators when it first runs. torch's lock (torch.utils.file_baton) is a file that the builder
holds open; one that nobody holds open is nobody's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

YOUNG_S = 120.0  # on a disk that machines share, another machine's build may hold it so long
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "smb", "cifs", "afs")


def clear_stale_locks(env: Mapping[str, str]) -> list[Path]:
    """Removes the locks that no process of this machine holds, on a shared disk only old ones. Returns the removed."""
    cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(env.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    removed = []
    for lock in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        try:
            young = time.time() - lock.stat().st_mtime < YOUNG_S
            if not (young and _is_shared(lock)) and not _is_held(lock):
                lock.unlink()
                removed.append(lock)
        except OSError:
            continue  # its builder has ended meanwhile, or it is another user's
    return removed


def _is_shared(path: Path) -> bool:
    """Whether its disk is one that other machines may write to as well."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    place = next((folder for folder in path.resolve().parents if folder in mounts), None)
    return place is not None and mounts[place].startswith(SHARED)


def _is_held(lock: Path) -> bool:
    """Whether a process that we may look at has it open."""
    for process in psutil.process_iter():
        try:
            if any(os.path.realpath(opened.path) == os.path.realpath(lock) for opened in process.open_files()):
                return True
        except psutil.Error:
            continue
    return False
