"""Removes stale locks of torch's C++ extension builds: a killed build leaves one, for which every later build waits.

DeepSpeed builds its operators when it first runs. torch's lock (torch.utils.file_baton) is a file that the building
process holds open; a lock that no process holds open is stale.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

YOUNG_S = 120.0  # on a shared disk, a process of another machine may hold a lock that is younger
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "smb", "cifs", "afs")


def clear_stale_locks(env: Mapping[str, str]) -> list[Path]:
    """Removes locks that no process of this machine holds; on a shared disk only old ones. Returns their paths."""
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
            continue  # the build has ended meanwhile, or the lock is another user's
    return removed


def _is_shared(path: Path) -> bool:
    """Whether `path` is on a file system that other machines may write to."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    mount = next((folder for folder in path.resolve().parents if folder in mounts), None)
    return mount is not None and mounts[mount].startswith(SHARED)


def _is_held(lock: Path) -> bool:
    """Whether a process has the file open, among those that this user may inspect."""
    for process in psutil.process_iter():
        try:
            if any(os.path.realpath(opened.path) == os.path.realpath(lock) for opened in process.open_files()):
                return True
        except psutil.Error:
            continue
    return False
