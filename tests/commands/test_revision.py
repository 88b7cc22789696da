"""The files of a git revision, in a copy: as they were stored. Nothing of the repository runs or is written to."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from against.plant import git
from samestep.commands.revision import find_revision
from samestep.commands.working_copy import COPIED, copy_folder
from samestep.errors import UserError
from samestep.message import Message


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, as the present folder."""
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text("old = 1\n")
    (folder / "package" / "gone.py").write_text("")
    (folder / "run.sh").write_text("true\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("train.py")
    (folder / ".gitignore").write_text("data/\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    (folder / "data").mkdir()
    (folder / "data" / "rows.txt").write_text("rows")
    monkeypatch.chdir(folder)
    return folder


def placed(project: Path, name: str = "main") -> Path:
    """The copy of a repository, with a revision's files."""
    copy = project.parent / "copy"
    copy_folder(project, copy, 1e12, project.parent / "none")
    find_revision(name).place(copy)
    return copy


def contents(folder: Path) -> dict[str, tuple[float, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime, path.read_bytes()) for path in files}


def refused(name: str) -> str:
    with pytest.raises(UserError) as error:
        find_revision(name)
    said = error.value.message
    assert isinstance(said, Message)
    return said.id


def test_tracked_files_are_the_revision_s_and_others_stay(project: Path) -> None:
    git(project, "mv", "train.py", "moved.py")
    git(project, "rm", "-q", "package/gone.py")
    (project / "run.sh").write_text("false\n")
    (project / "new.py").write_text("")
    git(project, "add", "new.py")
    (project / "beside.py").write_text("untracked")
    before = contents(project)
    copy = placed(project)
    names = {path.name for path in copy.iterdir()} - {".git", ".gitignore"}
    assert names == {"train.py", "run.sh", "link", "package", "data", "beside.py"}
    assert (copy / "train.py").read_text() == "old = 1\n" == (copy / "link").read_text()
    assert (copy / "package" / "gone.py").exists() and os.access(copy / "run.sh", os.X_OK)
    assert (copy / "data" / "rows.txt").read_text() == "rows"
    assert contents(project) == before, "the user's files, or git's, were written to"


def test_a_folder_that_is_linked_is_not_written_to(project: Path) -> None:
    (project / "package" / "gone.py").write_text("changed")
    copy = project.parent / "copy"
    copy.mkdir()
    (copy / "package").symlink_to(project / "package")
    (copy / "train.py").symlink_to(project / "train.py")
    (project / "package" / "beside.txt").write_text("beside")
    find_revision("main").place(copy)
    assert (copy / "package" / "gone.py").read_text() == "" and (
        copy / "package" / "beside.txt"
    ).read_text() == "beside"
    assert (project / "package" / "gone.py").read_text() == "changed"
    assert not (copy / "train.py").is_symlink()


def test_a_large_file_that_is_the_same_is_linked(project: Path) -> None:
    (project / "large.bin").write_bytes(b"1" * (COPIED + 1))
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "two")
    assert (placed(project) / "large.bin").is_symlink()


def test_a_large_file_that_is_another_is_not(project: Path) -> None:
    (project / "large.bin").write_bytes(b"1" * (COPIED + 1))
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "two")
    (project / "large.bin").write_bytes(b"2" * (COPIED + 1))
    copy = placed(project)
    assert not (copy / "large.bin").is_symlink() and (copy / "large.bin").read_bytes()[:1] == b"1"
    assert (project / "large.bin").read_bytes()[:1] == b"2"


def test_a_file_of_git_lfs_is_what_its_pointer_stands_for(project: Path) -> None:
    stored = b"weights"
    digest = hashlib.sha256(stored).hexdigest()
    for name, oid in (("here.bin", digest), ("elsewhere.bin", "0" * 64)):
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(stored)}\n"
        (project / name).write_text(pointer)
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "pointers")
    (project / "here.bin").write_bytes(stored)
    copy = project.parent / "copy"
    copy_folder(project, copy, 1e12, project.parent / "none")
    revision = find_revision("main")
    revision.place(copy)
    assert (copy / "here.bin").read_bytes() == stored
    assert [note.id for note in revision.notes] == ["large_file_is_not_here"]


def test_nothing_that_the_repository_names_runs(project: Path) -> None:
    """Its hooks, filters, monitor, pager and replaced objects."""
    ran = project.parent / "ran"
    command = f"touch {ran}; cat"
    (project / ".gitattributes").write_text("*.py filter=own diff=own\nrun.sh export-ignore\n")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "attributes")
    for name in ("core.fsmonitor", "core.pager", "filter.own.smudge", "filter.own.clean", "filter.own.process"):
        git(project, "config", name, command)
    for name in ("diff.own.textconv", "diff.own.command", "core.sshCommand", "core.editor", "credential.helper"):
        git(project, "config", name, command)
    hook = project.parent / "hooks" / "post-checkout"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    git(project, "config", "core.hooksPath", str(hook.parent))
    ran.unlink(missing_ok=True)
    before = contents(project / ".git")
    assert (placed(project) / "run.sh").exists()
    assert not ran.exists()
    assert contents(project / ".git") == before and not (project / ".git" / "worktrees").exists()


# A transport of an object that is not here, as of a partial clone from elsewhere: its address, and the settings that
# name a command for it. git-remote-own lies on the PATH.
TRANSPORTS = {
    "ext": ("ext::sh -c touch% {ran}", {}),
    "own": ("own::x", {}),
    "file": ("file://{here}", {"remote.o.uploadpack": "touch {ran}; git-upload-pack"}),
    "ssh": ("ssh://host/x", {"core.sshCommand": "touch {ran};"}),
    "git": ("git://host/x", {"core.gitProxy": "{bin}/git-remote-own"}),
    "vcs": ("x", {"remote.o.vcs": "own"}),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_not_here_is_not_fetched(transport: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a git that does not know GIT_NO_LAZY_FETCH, as before 2.45; the repository allows every protocol."""
    ran, bin = project.parent / "ran", project.parent / "bin"
    bin.mkdir()
    real = shutil.which("git")
    for name, text in (("git", f'unset GIT_NO_LAZY_FETCH; exec {real} "$@"'), ("git-remote-own", f"touch {ran}")):
        (bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin / name).chmod(0o755)
    url, settings = TRANSPORTS[transport]
    settings = {"remote.o.url": url, "remote.o.promisor": "true", "extensions.partialClone": "o"} | settings
    settings |= {"core.repositoryFormatVersion": "1", "core.askPass": "touch {ran};"}
    settings |= {f"protocol.{name}.allow": "always" for name in TRANSPORTS}
    for name, value in settings.items():
        git(project, "config", name, value.format(ran=ran, here=project, bin=bin))
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    copy = placed(project)
    assert (copy / "train.py").read_text() == "old = 1\n"
    id = git(project, "rev-parse", "main:train.py").strip()
    (project / ".git" / "objects" / id[:2] / id[2:]).unlink()
    with pytest.raises(UserError) as error:
        find_revision("main").place(copy)
    assert error.value.message.id == "object_is_not_here" and not ran.exists()


def test_a_folder_that_looks_like_a_repository_is_none(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have come with the user's own repository, and has a configuration of its own."""
    inner = project / "data" / "inner"
    shutil.copytree(project / ".git", inner)
    git(inner, "config", "core.worktree", str(inner))
    monkeypatch.chdir(inner)
    assert refused("main") == "no_git_repository"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("--output=file", "no_name_of_a_revision"),
        ("-h", "no_name_of_a_revision"),
        ("a\nb", "no_name_of_a_revision"),
        ("nowhere", "no_such_revision"),
        ("$(touch ran)", "no_such_revision"),
        ("main; touch ran", "no_such_revision"),
    ],
)
def test_what_is_no_revision_is_one_sentence(name: str, why: str, project: Path) -> None:
    assert refused(name) == why
    assert not (project / "ran").exists() and not (project / "file").exists()


def test_a_folder_without_a_repository_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert refused("main") == "no_git_repository"


def test_another_repository_of_the_environment_is_not_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hook of git sets it."""
    monkeypatch.setenv("GIT_DIR", str(project.parent / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(project.parent / "index"))
    assert find_revision("main").top == project


def test_without_git_it_is_one_sentence(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))
    assert refused("main") == "git_is_not_installed"
