"""A revision of the git repository around the working directory, and its files in a copy of it.

git reads objects here, and nothing else: no checkout, no hook, no filter, no worktree. Its index, its configuration and
the user's files stay as they are.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from samestep.commands.working_copy import COPIED
from samestep.errors import UserError
from samestep.message import Message, message
from samestep.world.regular_files import open_regular

# What a repository's configuration could make git run is off: a monitor of files, hooks, helpers that know passwords, a
# folder of its files that looks like a repository. Replaced objects are not followed.
GIT: tuple[str, ...] = ("git", "--no-pager", "--no-replace-objects", "--no-optional-locks", "--literal-pathspecs")
GIT += ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "-c", "credential.helper=")
GIT += ("-c", "safe.bareRepository=explicit")
# What is not here is not fetched, by a command that the repository names as its transport: no protocol is allowed.
# GIT_NO_LAZY_FETCH is unknown to git before 2.45, and protocol.allow=never loses to a repository's protocol.NAME.allow.
OFFLINE = {"GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1", "GIT_ASKPASS": "", "GIT_TERMINAL_PROMPT": "0"}
OFFLINE |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
ID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
LINK, FILES, SUBMODULE = "120000", ("100644", "100755"), "160000"  # modes of a tree
POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)
LONGEST_POINTER = 1024
PATIENCE_S = 120


@dataclass(frozen=True)
class Entry:
    """A file of a tree. mode: as git has it. id: of its contents."""

    mode: str
    id: str


@dataclass(frozen=True)
class Revision:
    """A commit. name: as it was given. top: the folder of the working directory's repository. files: path from there ->
    the commit's file; tracked: the index's. git_folder: where its objects are."""

    name: str
    commit: str
    top: Path
    files: Mapping[str, Entry]
    tracked: Mapping[str, Entry]
    git_folder: Path
    notes: list[Message] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Its name, and the first digits of its commit where these are not the name."""
        return self.name if self.commit.startswith(self.name) else f"{self.name} ({self.commit[:9]})"

    def place(self, copy: Path) -> None:
        """Makes the tracked files of a copy of `top` those of this commit; others stay. What is linked there is not
        written to."""
        for path in self.tracked.keys() - self.files.keys():
            target = _own(copy, path)
            if target.is_symlink() or not target.is_dir():
                target.unlink(missing_ok=True)
                _remove_empty(target.parent, copy)
        wanted = []
        for path, entry in self.files.items():
            if entry.mode == SUBMODULE:
                self.notes.append(message("submodule_stays", path=path))
            elif entry.mode in (*FILES, LINK) and not self._is_linked(copy, path, entry):
                wanted.append((path, entry))
        for (path, entry), contents in zip(wanted, self._contents([entry.id for _, entry in wanted]), strict=True):
            self._write(_own(copy, path), path, entry, contents)

    def _is_linked(self, copy: Path, path: str, entry: Entry) -> bool:
        """Returns whether a large file of the working directory has the commit's contents, and the copy a link to
        it."""
        file = self.top / path
        with suppress(OSError):
            is_large = entry.mode in FILES and not file.is_symlink() and file.stat().st_size > COPIED
            if is_large and _id_of(file, len(entry.id)) == entry.id:
                target = _own(copy, path)
                target.unlink(missing_ok=True)
                target.symlink_to(file)
                return True
        return False

    def _write(self, target: Path, path: str, entry: Entry, contents: bytes) -> None:
        if target.is_dir() and not target.is_symlink():
            raise UserError(message("revision_has_a_file_for_a_folder", revision=self.title, path=path))
        target.unlink(missing_ok=True)
        if entry.mode == LINK:
            target.symlink_to(os.fsdecode(contents))
            return
        pointer = POINTER.match(contents) if len(contents) <= LONGEST_POINTER else None
        if pointer and (stored := self._stored(path, pointer[1].decode(), int(pointer[2]))):
            target.symlink_to(stored)
            return
        if pointer:
            self.notes.append(message("large_file_is_not_here", path=path, revision=self.title))
        target.write_bytes(contents)
        if entry.mode == FILES[1]:
            target.chmod(0o755)

    def _stored(self, path: str, digest: str, size: int) -> Path | None:
        """Returns the file that a pointer of Git LFS stands for, where this machine has it."""
        stored = self.git_folder / "lfs" / "objects" / digest[:2] / digest[2:4] / digest
        if stored.is_file():
            return stored
        file = self.top / path
        with suppress(OSError):
            if file.stat().st_size == size and _digest(file, hashlib.sha256()) == digest:
                return file
        return None

    def _contents(self, ids: list[str]) -> Iterator[bytes]:
        """Yields the contents of objects, in turn, as they are stored: no filter is run."""
        with tempfile.TemporaryFile() as asked:
            asked.write("".join(f"{id}\n" for id in ids).encode())
            asked.seek(0)
            with _start_git(self.top, "cat-file", "--batch", stdin=asked) as process:
                assert process.stdout
                for id in ids:
                    yield self._next(process.stdout, id)

    def _next(self, output: IO[bytes], id: str) -> bytes:
        words = output.readline().decode(errors="replace").split()
        if len(words) != 3 or words[:2] != [id, "blob"]:
            raise UserError(message("object_is_not_here", id=id[:9], revision=self.title))
        contents = output.read(int(words[2]))
        output.read(1)
        return contents


def find_revision(name: str) -> Revision:
    """Returns a revision of the repository around the working directory. Raises UserError where there is none."""
    if name.startswith("-") or not name or not name.isprintable():
        raise UserError(message("no_name_of_a_revision", revision=name[:80]))
    current_folder = Path.cwd()
    top_line = _git(current_folder, "rev-parse", "--show-toplevel")
    if top_line is None:
        raise UserError(message("no_git_repository", folder=current_folder))
    top = Path(os.fsdecode(top_line).removesuffix("\n"))
    if not current_folder.resolve().is_relative_to(top.resolve()):
        raise UserError(message("no_git_repository", folder=current_folder))
    commit = _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    commit_id = (commit or b"").decode(errors="replace").strip()
    if not ID.fullmatch(commit_id):
        raise UserError(message("no_such_revision", revision=name[:80], folder=top))
    common = _git(top, "rev-parse", "--git-common-dir") or b".git"
    tree, index = _git(top, "ls-tree", "-r", "-z", "--full-tree", commit_id), _git(top, "ls-files", "-s", "-z")
    if tree is None or index is None:
        raise UserError(message("no_such_revision", revision=name[:80], folder=top))
    git_folder = top / os.fsdecode(common).removesuffix("\n")
    return Revision(name, commit_id, top, _entries(tree, place=2), _entries(index, place=1), git_folder)


def _entries(listed: bytes, place: int) -> dict[str, Entry]:
    """Parses what git lists: 'MODE …\\tPATH', with the contents' id in this place."""
    entries = {}
    for line in filter(None, listed.split(b"\0")):
        facts, _, path = line.partition(b"\t")
        words, name = facts.decode().split(), os.fsdecode(path)
        if any(part in ("..", ".git") for part in PurePosixPath(name).parts) or name.startswith("/"):
            raise UserError(message("revision_has_a_foreign_path", path=name[:80]))
        entries[name] = Entry(words[0], words[place])
    return entries


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Returns what git prints; None where it fails. Raises UserError where there is no git."""
    try:
        with _start_git(folder, *arguments) as process:
            try:
                printed, _ = process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise UserError(message("git_does_not_answer", seconds=PATIENCE_S)) from None
    except FileNotFoundError:
        raise UserError(message("git_is_not_installed")) from None
    return printed if process.returncode == 0 else None


def _start_git(folder: Path, *arguments: str, stdin: IO[bytes] | int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Starts git in a folder, where nothing that the repository names can run. Every git is started here."""
    command = [*GIT, "-C", str(folder), *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment())


def _environment() -> dict[str, str]:
    """Returns git's environment: no variable leads to another repository, as those do that a hook runs with."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return variables | {name: os.environ[name] for name in os.environ if name.startswith("GIT_CONFIG")} | OFFLINE


def _own(copy: Path, path: str) -> Path:
    """Returns a path of a copy, each of whose folders is the copy's own: a link to one of the user's is replaced by a
    folder of links to what that holds."""
    folder = copy
    for part in PurePosixPath(path).parts[:-1]:
        folder /= part
        if folder.is_symlink():
            original = folder.resolve()
            folder.unlink()
            folder.mkdir()
            for entry in original.iterdir() if original.is_dir() else ():
                (folder / entry.name).symlink_to(entry)
        elif not folder.is_dir():
            folder.unlink(missing_ok=True)
            folder.mkdir()
    return copy / path


def _remove_empty(folder: Path, copy: Path) -> None:
    """Removes folders that are empty by now: Python would import one as a package."""
    with suppress(OSError):
        while folder != copy:
            folder.rmdir()
            folder = folder.parent


def _id_of(file: Path, digits: int) -> str:
    """Returns the id that git gives to a file's contents."""
    hashed = hashlib.sha1(usedforsecurity=False) if digits == 40 else hashlib.sha256()
    hashed.update(b"blob %d\0" % file.stat().st_size)
    return _digest(file, hashed)


def _digest(file: Path, hashed: hashlib._Hash) -> str:
    with open_regular(file) as opened:
        while block := opened.read(1 << 20):
            hashed.update(block)
    return hashed.hexdigest()
