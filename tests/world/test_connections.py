"""Unix sockets: below paths of any length, in folders of this user alone, for peers of this user alone."""

from __future__ import annotations

import ast
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from budget import budget
from samestep.errors import UserError
from samestep.world.connections import accept, connect, listen, make_private

SOURCE = Path(__file__).parents[2] / "src" / "samestep"
ANOTHER = 65534  # nobody


def below(folder: Path, length: int) -> Path:
    """A private folder whose path has this many characters."""
    while length - len(str(folder)) > 1:
        folder = folder / ("x" * min(length - len(str(folder)) - 1, 100))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("length", [0, 125, 240])
def test_a_connection_below_a_folder_of_any_length(length: int, tmp_path: Path) -> None:
    folder = below(make_private(tmp_path / "sockets"), length)
    with listen(folder / "s") as listening, connect(folder / "s", budget(20)) as ours, accept(listening) as accepted:
        accepted.sendall(b"x")
        assert ours.recv(1) == b"x"
    if length:  # the faulty twin: by its path alone
        with socket.socket(socket.AF_UNIX) as plain, pytest.raises(OSError, match="too long"):
            plain.bind(str(folder / "t"))


@pytest.mark.parametrize("mode", [0o750, 0o707])
def test_none_listens_in_a_folder_that_others_may_enter(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(UserError, match=r"folder_is_not_private|TMPDIR"):
        listen(tmp_path / "s")
    assert not [*tmp_path.iterdir()]


@contextmanager
def as_another_user(act: Callable[..., None], *given: Any) -> Iterator[None]:
    """Calls `act` in a process of another user, which must end in time."""
    if os.getuid() or not which("setpriv"):
        pytest.skip("only root can start a process of another user")

    def run() -> None:
        os.setgroups([])
        os.setgid(ANOTHER)
        os.setuid(ANOTHER)
        act(*given)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        yield
    finally:
        process.join(budget(20))
        process.kill()
    assert process.exitcode == 0


def _refused(path: str) -> None:
    """Connects in every way; is let in by none."""
    with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(PermissionError):
        stranger.connect(path)


def _dropped(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        assert stranger.recv(1) == b""


def _listens(path: str, ready: Any, done: Any) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(path)
        stranger.listen(1)
        ready.set()
        done.wait()


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every user can reach, which tmp_path is not."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_another_user_is_not_let_in(open_path: Path) -> None:
    """Neither by the folder, nor, where that has been opened, by the socket's own check."""
    with listen(open_path / "s") as listening:
        with as_another_user(_refused, str(open_path / "s")):
            pass
        open_path.chmod(0o711)
        (open_path / "s").chmod(0o777)
        accepted: list[socket.socket] = []
        waits = threading.Thread(target=lambda: accepted.append(accept(listening)))
        waits.start()
        with as_another_user(_dropped, str(open_path / "s")):
            pass
        assert not accepted
        with connect(open_path / "s", budget(20)):  # the healthy twin, after it
            waits.join()
        accepted[0].close()


def test_nothing_is_sent_to_a_socket_of_another_user(open_path: Path) -> None:
    open_path.chmod(0o777)
    ready, done = multiprocessing.Event(), multiprocessing.Event()
    with as_another_user(_listens, str(open_path / "s"), ready, done):
        assert ready.wait(budget(20))
        (open_path / "s").chmod(0o777)
        with pytest.raises(PermissionError, match="another user"):
            connect(open_path / "s", budget(20))
        done.set()


def test_every_unix_socket_is_made_there() -> None:
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    trees = {file: ast.parse(text) for file, text in texts.items() if "AF_UNIX" in text}
    made = {
        file
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "AF_UNIX"
    }
    assert made == {"world/connections.py"}
