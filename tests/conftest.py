"""Processes that are kept between tests: those that fork workers, and ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from budget import budget
from command import TESTS
from ranks import Ranks
from samestep.launch.fork_client import SOCKETS

# One thread a rank, unless a test says otherwise: equal on one rank and on several, and not more than the cores are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
SLOWEST_TEST_IMPORTS = 400  # a test that takes longer hangs: the slowest takes about 100


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test a deadline, at which pytest-timeout prints the stacks of its threads and fails it."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(budget(SLOWEST_TEST_IMPORTS)))


@pytest.fixture(scope="session", autouse=True)
def fork_servers() -> Iterator[None]:
    """Every command of the tests asks these for its workers, which then need not import torch again."""
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        command = [sys.executable, "-m", "samestep.worker", "--fork-server"]
        paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        alone = os.environ | {"PYTHONPATH": paths} | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        sockets = [Path(folder) / of for of in ("ranks", "reference")]
        servers = [subprocess.Popen([*command, path.name, str(path)], env=alone) for path in sockets]
        while not all(path.exists() for path in sockets):
            assert all(server.poll() is None for server in servers), "a fork server has ended"
            time.sleep(0.05)
        os.environ[SOCKETS] = folder
        yield
        for server in servers:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(n): n ranks, started once for all tests."""
    with ExitStack() as stack:
        kept: dict[int, Ranks] = {}

        def of(size: int) -> Ranks:
            if size not in kept:
                kept[size] = stack.enter_context(Ranks(size))
            return kept[size]

        yield of


@pytest.fixture(scope="session")
def reference_rank() -> Iterator[Ranks]:
    """The process that plays the reference."""
    with Ranks(1) as rank:
        yield rank
