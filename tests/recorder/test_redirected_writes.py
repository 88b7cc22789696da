"""What a replay writes outside of its copy of the working directory: the user's files stay as they are."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from samestep.rank.hooks import Hooks
from samestep.recorder.redirected_writes import RedirectedWrites


@pytest.fixture
def user(tmp_path: Path, hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a folder of the user's with a file, outside of the replay's own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("user", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "user" / "log").write_text("ranks\n")
    (tmp_path / "work" / "link").symlink_to(tmp_path / "user" / "log")
    RedirectedWrites([tmp_path / "work"], tmp_path / "elsewhere").attach(hooks)
    yield tmp_path / "user"
    hooks.detach()
    assert {path.name for path in (tmp_path / "user").iterdir()} == {"log"}
    assert (tmp_path / "user" / "log").read_text() == "ranks\n"


def test_what_is_written_is_read_again(user: Path) -> None:
    log, new = user / "log", user / "new"
    with open(log, "a") as file:
        file.write("replay\n")
    assert log.read_text() == "ranks\nreplay\n"
    log.write_text("anew")
    assert log.read_text() == "anew" and not new.exists()
    os.close(os.open(new, os.O_CREAT | os.O_WRONLY))
    assert new.exists() and new.read_text() == ""
    torch.save({"a": 1}, str(user / "model.pt"))
    os.replace(user / "model.pt", user / "best.pt")
    assert torch.load(user / "best.pt") == {"a": 1} and not (user / "model.pt").exists()


def test_a_link_in_the_copy_leads_to_no_file_of_the_user(user: Path) -> None:
    link = user.parent / "work" / "link"
    link.write_text("replay")
    assert link.read_text() == "replay"


def test_what_is_deleted_or_moved_stays(user: Path) -> None:
    os.replace(user / "log", user / "old")
    assert (user / "old").read_text() == "ranks\n"
    (user / "log").unlink()
    shutil.rmtree(user)
    (user / "old").unlink()
    assert not (user / "old").exists()


def test_new_temporary_files_are_the_replays_own(user: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "file").write_text("1")
        Path(folder, "file").write_text("2")
        assert os.listdir(folder) == ["file"] and Path(folder, "file").read_text() == "2"
    assert not os.path.lexists(folder)
    (user.parent / "work" / "file").write_text("3")
    assert os.listdir(user.parent / "work") and not (user.parent / "elsewhere" / "work").exists()
