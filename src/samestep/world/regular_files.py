"""Opens, creates and removes files and folders where others may have put something: all of samestep does it here.

What is read is a regular file of bounded size: a named pipe would wait for ever. What is written is new, or was a
regular file: no link in its place is followed, so nothing that it leads to is changed. What is removed has a name that
samestep gives. The path that a user has typed, as of --out, may lead through links; what lies in that folder may not.
tests/test_written_files.py finds the calls that go past this module.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from samestep.errors import UserError
from samestep.message import Message, message

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
UNBOUNDED = 1 << 62


class NotRegular(OSError):
    """What is opened is no regular file, or is too large. strerror: 'it is a named pipe, not a file'."""

    def __init__(self, why: str, path: Path) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_regular(path: Path, most: int = UNBOUNDED, *, buffering: int = -1) -> IO[bytes]:
    """Opens a file for reading; links are followed. Raises NotRegular for what is no file, or has over `most` bytes."""
    _check_kind(os.stat(path), path, most)  # before it is opened, which alone starts what some devices do
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(os.fstat(descriptor), path, most)  # again, because another process may have replaced it
    except NotRegular:
        os.close(descriptor)
        raise
    return open(descriptor, "rb", buffering)


class PlaceTaken(UserError, OSError):
    """What is in the place of a file or a folder of samestep's is not one that it can have made, and stays as it is.

    An OSError, too: what may fail to be written, as on a full disk, may fail for this.
    """

    def __init__(self, path: Path, kind: Message) -> None:
        UserError.__init__(self, message("place_is_taken", path=path, kind=kind))
        self.errno, self.strerror, self.filename = errno.EEXIST, "something else is in its place", str(path)


def open_new(path: Path, *, text: bool = False, buffering: int = -1, mode: int = 0o666) -> IO[Any]:
    """Opens a file for writing in the place of what has its name: a link there is removed, and changes no other file.

    text: lines end as they are written. mode: the permissions, less those that the umask takes. Raises PlaceTaken.
    """
    remove_file(path)
    opener = partial(os.open, mode=mode)
    # Mode x refuses a link, too, that another process has put there since.
    return open(path, "x" if text else "xb", buffering, newline="" if text else None, opener=opener)


def check_place(path: Path, *, of_a_folder: bool = False) -> None:
    """Raises PlaceTaken where something else is in the place of a file, which replaces links and named pipes, or of a
    folder: before work is done whose results could not be kept."""
    _check_place(path, stat.S_IFDIR if of_a_folder else None)


def open_end(path: Path, *, text: bool = False, buffering: int = -1) -> IO[Any]:
    """Opens a file, or a new one, to write to its end: each write goes to the end that the file then has. Raises
    PlaceTaken."""
    return open(end_of(path), "a" if text else "ab", buffering, newline="" if text else None)


def end_of(path: Path) -> int:
    """Opens a file as open_end does. Returns its descriptor, for what a process prints."""
    return _open_kept(path, os.O_WRONLY | os.O_APPEND)


def open_kept(path: Path) -> IO[bytes]:
    """Opens a file, or a new one, to read and write what it holds, without a buffer. Raises PlaceTaken."""
    return open(_open_kept(path, os.O_RDWR, 0o644), "r+b", 0)


def _open_kept(path: Path, flags: int, mode: int = 0o666) -> int:
    """Opens a regular file that has no other name; O_NONBLOCK: a named pipe would wait for its other end."""
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, mode)
    except OSError:
        _check_place(path, stat.S_IFREG)
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise PlaceTaken(path, message("kind_second_name") if status.st_nlink > 1 else _kind(status.st_mode))
    return descriptor


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """Returns the paths in a folder that match a pattern; none where the folder is not there, or goes meanwhile."""
    try:
        return [*folder.glob(pattern)]
    except OSError:
        return []


def make_folder(path: Path) -> Path:
    """Creates a folder of samestep's, where there is none; the one above it exists. Returns it. Raises PlaceTaken for a
    link: what is written into it, or removed from it, would be somewhere else."""
    try:
        path.mkdir()
    except FileExistsError:
        _check_place(path, stat.S_IFDIR)
    return path


def make_named_folder(path: Path) -> Path:
    """Creates a folder that a user has named, and those above it; links are followed. Returns it."""
    path.mkdir(parents=True, exist_ok=True)
    return path


def remove_file(path: Path) -> None:
    """Removes a file, a link or a named pipe, where there is one: before a new one is written, also by a library that
    opens it by its name. Raises PlaceTaken for a folder, and for a device, as /dev/full, which root could remove."""
    _check_place(path, None)
    path.unlink(missing_ok=True)


def move_file(new: Path, path: Path) -> None:
    """Gives a file that was just written the name of another one, whose place it takes. Raises PlaceTaken for a
    folder or a device."""
    _check_place(path, None)
    os.replace(new, path)


def move_folder(new: Path, path: Path) -> None:
    """Gives a folder that was just filled a name that is free, or that of an empty folder."""
    os.replace(new, path)


def remove_folder(folder: Path, names: re.Pattern[str]) -> None:
    """Removes from a folder the files whose paths in it match `names`, and the folders that are empty then.

    What lies behind a link stays; so does what has another name. Raises PlaceTaken for a folder that is a link.
    """
    _check_place(folder, stat.S_IFDIR)
    _empty(folder, names)
    with suppress(OSError):  # it is not there, or holds something else
        folder.rmdir()


def _empty(folder: Path, names: re.Pattern[str]) -> None:
    for inside, folders, files in os.walk(folder, topdown=False):
        for path in [Path(inside, name) for name in (*files, *folders)]:
            with suppress(OSError):  # a folder that holds something else; a disk that is read-only
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                elif names.fullmatch(path.relative_to(folder).as_posix()):
                    path.unlink()


def fresh_folder(root: Path, folder: Path, names: re.Pattern[str]) -> Path:
    """Creates an empty folder below `root`, and those between: removes from it what an earlier command has left there,
    by its names. Returns it. Raises PlaceTaken for a link, and for a file of another name."""
    path = folder.relative_to(root)
    for level in reversed([path, *path.parents][:-1]):
        make_folder(root / level)
    _empty(folder, names)
    for inside, _, files in os.walk(folder):
        for left in files:
            raise PlaceTaken(Path(inside, left), message("kind_other_file"))
    return folder


def new_folder(parent: Path, prefix: str) -> Path:
    """Creates a folder of a new name that begins with `prefix`, for this user alone, to be removed with
    remove_made_folder. Returns it."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=make_named_folder(parent)))


def remove_empty_folder(folder: Path) -> None:
    """Removes a folder in which nothing is. Raises OSError for another one."""
    folder.rmdir()


def remove_made_folder(folder: Path) -> None:
    """Removes a folder that this command has created itself, with all that is in it; nothing behind a link."""
    shutil.rmtree(folder, ignore_errors=True)


def _check_place(path: Path, expected: int | None) -> None:
    """Raises PlaceTaken where something of another kind is at `path`. None: where a folder or a device is."""
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(path).st_mode
        kind = stat.S_IFMT(mode)
        if kind in (stat.S_IFDIR, stat.S_IFCHR, stat.S_IFBLK) if expected is None else kind != expected:
            raise PlaceTaken(path, _kind(mode))


def _kind(mode: int) -> Message:
    kinds = {
        stat.S_IFREG: message("kind_file"),
        stat.S_IFLNK: message("kind_link"),
        stat.S_IFDIR: message("kind_folder"),
        stat.S_IFIFO: message("kind_pipe"),
    }
    return kinds.get(stat.S_IFMT(mode), message("kind_device"))


def read_regular(path: Path, most: int = UNBOUNDED) -> bytes:
    """Returns the bytes of a file. Raises NotRegular as open_regular does."""
    with open_regular(path, most) as file:
        return file.read()


def check_regular(path: Path, most: int = UNBOUNDED) -> None:
    """Raises NotRegular as open_regular does: for a file that a library opens by its name."""
    open_regular(path, most).close()


def _check_kind(status: os.stat_result, path: Path, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise NotRegular(f"it is {kind}, not a file", path)
    if status.st_size > most:
        raise NotRegular(f"it has {status.st_size:,} bytes, more than the {most:,} that such a file may have", path)
