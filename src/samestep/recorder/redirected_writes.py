"""Keeps a replay from writing over a user's files: what it writes outside of its copy of the working directory goes
elsewhere, and is read again from there. What it deletes there stays.

It sees what Python opens, moves and deletes, and torch.save; not what another process or a library in C writes.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from samestep.job.foreign import is_a
from samestep.rank.hooks import Hooks

WRITING = os.O_WRONLY | os.O_RDWR
# Folders of the system, and caches of libraries, which others read by their names.
SHARED = ("/proc", "/sys", "~/.cache", "~/.triton")


class RedirectedWrites:
    """Redirects what is written outside of some folders. inside: these folders. elsewhere: where it goes."""

    def __init__(self, inside: Sequence[Path], elsewhere: Path) -> None:
        self._elsewhere = elsewhere
        folders = [*map(str, inside), str(elsewhere), *map(os.path.expanduser, SHARED)]
        self._inside = [os.path.realpath(folder) for folder in folders]
        self._temporary = os.path.realpath(tempfile.gettempdir())
        self._own = set[str]()  # temporary files and folders that the replay has made

    def attach(self, hooks: Hooks) -> None:
        """Patches what opens, moves and deletes files."""

        def new_open(opens: Any, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            changes = is_a(mode, str) and not {*mode}.isdisjoint("wax+")
            place = self._written(file, keeps="w" not in mode) if changes else self._read(file)
            return opens(place, mode, *args, **kwargs)

        def new_os_open(opens: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None:
                keeps = not flags & os.O_TRUNC
                path = self._written(path, keeps=keeps) if flags & WRITING else self._read(path)
            return opens(path, flags, *args, **kwargs)

        def new_save(save: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            return save(obj, self._written(f), *args, **kwargs)

        def new_stat(ask: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            return ask(path if kwargs.get("dir_fd") is not None else self._read(path), *args, **kwargs)

        def new_make(make: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_users(path)
            return make(path, *args, **kwargs)

        def new_move(move: Any, source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            # Of a user's file a copy is moved.
            return move(self._written(source, keeps=True), self._written(target), *args, **kwargs)

        def new_delete(delete: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:
                return delete(path, *args, **kwargs)
            place = self._read(path)
            return None if place is path and self._is_users(path) else delete(place, *args, **kwargs)

        hooks.attach(builtins, "open", new_open, io)
        hooks.attach(os, "open", new_os_open)
        hooks.attach(torch, "save", new_save)
        hooks.attach(os, "stat", new_stat)
        hooks.attach(os, "mkdir", new_make)
        for name in ("replace", "rename"):
            hooks.attach(os, name, new_move)
        for owner, name in ((os, "remove"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
            hooks.attach(owner, name, new_delete)

    def _is_users(self, path: Any) -> bool:
        """Returns whether a path is that of a file of the user, or of a new one in the user's folders."""
        if not is_a(path, str | bytes | os.PathLike):
            return False
        real = os.path.realpath(os.fsdecode(path))
        is_there = os.path.lexists(real)
        mode = os.lstat(real).st_mode if is_there else stat.S_IFREG
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return False  # a device or a pipe
        if _is_in(real, [self._temporary]) and not is_there:
            self._own.add(real)
        return not _is_in(real, self._inside) and not _is_in(real, self._own)

    def _read(self, path: Any) -> Any:
        """Returns where a file is to be read."""
        if not is_a(path, str | bytes | os.PathLike) or not os.path.lexists(self._place(path)):
            return path
        return self._place(path)

    def _written(self, path: Any, *, keeps: bool = False) -> Any:
        """Returns where a file is to be written. keeps: with what it holds."""
        if not self._is_users(path):
            return path
        source, target = os.path.realpath(os.fsdecode(path)), self._place(path)
        if not os.path.isdir(os.path.dirname(source)):
            return path  # as it would, this fails
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if keeps and os.path.isfile(source) and not os.path.lexists(target):
            shutil.copyfile(source, target)
        return target

    def _place(self, path: Any) -> str:
        return f"{self._elsewhere}{os.path.realpath(os.fsdecode(path))}"


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}{os.sep}") for folder in folders)
