"""Processes that are kept between tests: those that fork workers, and ranks."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import fork_servers
from budget import budget
from ranks import KeptRanks, Ranks

pytest_plugins = ["pytester", "outcomes", "samestep.testing"]  # the last is loaded by itself where it is installed

# One thread a rank, unless a test says otherwise: equal on one rank and on several, and not more than the cores are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests start thousands of processes, which take a third of a second each to compile what they import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# In memory, where there is room: the tests write and remove some hundred thousand small files, and wait for each.
MEMORY = Path("/dev/shm")
OWN_TEMPORARY: Path | None = None  # of the pytest that has made it, not of those that it starts
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    for left in MEMORY.glob("samestep-tests-*-*"):  # of runs in which a test failed, or that were killed
        if not psutil.pid_exists(int(left.name.split("-")[2])):
            shutil.rmtree(left, ignore_errors=True)
    OWN_TEMPORARY = Path(tempfile.mkdtemp(prefix=f"samestep-tests-{os.getpid()}-", dir=MEMORY))
    OWN_TEMPORARY.chmod(0o755)  # as /tmp: munged wants to enter the folders above its socket
    os.environ["TMPDIR"] = tempfile.tempdir = str(OWN_TEMPORARY)
RECORDS = Path(__file__).parents[1] / "results"
RANK = "samestep-rank"  # the plugin that a rank of a test has
SLOWEST_TEST_IMPORTS = 400  # a test that takes longer hangs: the slowest takes about 100
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background; the tests' commands would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(exitstatus: int) -> None:
    if OWN_TEMPORARY and exitstatus == 0:  # else somebody reads what is in it; the next run removes it
        shutil.rmtree(OWN_TEMPORARY, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives each test a deadline, at which pytest-timeout prints the stacks of its threads and fails it.

    Files that may not be left out come first. Of the others those come first that were not there when the lane was
    measured, then those that took longest, so that the processes end together.
    """
    if config.pluginmanager.hasplugin(RANK):
        return  # a rank's test has its own
    records = sorted(RECORDS.glob("tests_*/check.json"))
    seconds = json.loads(records[-1].read_text())["seconds_of_files"] if records else {}
    always = config.getoption("--always")

    def place(item: pytest.Item) -> tuple[bool, float]:
        file = item.nodeid.partition("::")[0]
        return file not in always, -seconds.get(file, math.inf)

    items.sort(key=place)
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(budget(SLOWEST_TEST_IMPORTS)))


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[None]:
    """Every command of the tests asks these servers for its workers, which then need not import torch again."""
    is_rank = config.pluginmanager.hasplugin(RANK)  # it runs no commands
    if is_rank or hasattr(config, "workerinput") or config.option.collectonly:
        return (yield)
    with fork_servers.of_lane(whole=bool(config.getoption("numprocesses", 0))):
        budget()  # measures an import of torch, for the processes that start now
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _fork_servers(request: pytest.FixtureRequest) -> None:
    if not request.config.pluginmanager.hasplugin(RANK):
        fork_servers.wait()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """ranks(n, engine): n ranks, started once for all tests that use them one after another."""
    with KeptRanks() as kept:
        yield kept.of


@pytest.fixture(scope="session")
def reference_rank() -> Iterator[Ranks]:
    """The process that plays the reference."""
    with Ranks(1) as rank:
        yield rank
