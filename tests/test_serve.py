"""The fork server of the tests' ranks: what fails in one of its processes fails for no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import fork_servers
from budget import budget, wait_until
from ranks import SOURCE
from samestep.world.connections import connect

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def server() -> Iterator[Path]:
    with fork_servers.of_ranks() as path:
        yield path


def ask(server: Path, libraries: str = "json", source: Path = SOURCE, waits: bool = True) -> int | None:
    """Has a rank forked, which ends at once. Returns what the server answers; None where nobody waits for it."""
    rank = {"environment": {}, "path": [str(source)], "plans": "/dev/null", "log": "/dev/null"}
    with connect(server, budget()) as connection:
        connection.sendall(f"{json.dumps({'libraries': libraries, **rank})}\n".encode())
        return int(connection.makefile().readline() or 0) if waits else None


def test_an_import_that_fails_is_answered_and_fails_for_no_other(server: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert ask(server, "no_such_library", waits=False) is None
        assert ask(server, "no_such_library") == 0
    (tmp_path / "samestep").mkdir()
    (tmp_path / "samestep" / "__init__.py").write_text("raise ImportError('planted')")
    assert ask(server, source=tmp_path, waits=False) is None
    assert [bool(ask(server, source=tmp_path)), bool(ask(server)), bool(ask(server))] == [False, True, True]


@pytest.mark.parametrize("depth", [1, 2], ids=["with the libraries", "with samestep"])
def test_a_process_that_was_killed_is_forked_again(depth: int, server: Path) -> None:
    assert ask(server)
    parents = [psutil.Process(int(server.with_suffix(".pid").read_text()))]
    for _ in range(depth):
        parents = [child for parent in parents for child in parent.children()]
    for process in parents:
        process.kill()
    wait_until(lambda: not any(process.is_running() for process in parents), "a killed process is still there")
    assert ask(server)
