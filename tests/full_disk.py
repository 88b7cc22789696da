"""A disk that is full when a certain file is synced to it."""

from __future__ import annotations

import errno
import os

import pytest


def fill(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes the disk full for the file `name`, which this process writes under another name and then renames."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).startswith(f".{name}."):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
