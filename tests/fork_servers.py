"""Processes that fork samestep's workers, kept over many commands, which then need not import torch again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

import command_server
import serve
from budget import wait_until
from samestep.launch.fork_client import SOCKETS
from samestep.world.processes import die_with_parent

TESTS = Path(__file__).parent
WORKER = "import sys; del sys.path[0]; from samestep.worker import main; main(sys.argv[1:])"
# For a whole lane, libraries that are there are imported once: lightning, with torchmetrics and scipy, takes longer
# than torch.
LIBRARIES = ("lightning", "accelerate", "transformers.trainer", "deepspeed.runtime.zero.muon.muon_optimizer")
OF_A_LANE = f"""import gc, importlib, contextlib
gc.disable()
for library in {LIBRARIES}:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(library)
{WORKER}"""
WORKERS = ("ranks", "reference")


@contextmanager
def fork_servers(start: str = WORKER, purposes: Sequence[str] = WORKERS) -> Iterator[None]:
    """While it runs, every command asks these servers for its workers. start: their program."""
    with started(start, purposes):
        wait(purposes)
        yield


@contextmanager
def of_lane(whole: bool) -> Iterator[None]:
    """As fork_servers, for all processes of a run of pytest, which wait() for them. whole: it has many tests, whose
    commands and ranks are forked, too."""
    if not whole:
        with started(WORKER, WORKERS):
            yield
        return
    with started(OF_A_LANE, WORKERS):
        programs = [command_server, serve]
        paths = [Path(os.environ[SOCKETS]) / program.NAME for program in programs]
        lines = [[sys.executable, str(program.__file__), str(path)] for program, path in zip(programs, paths)]
        with _running(lines, paths):
            yield


@contextmanager
def of_ranks() -> Iterator[Path]:
    """While it runs, a server forks the ranks of tests. Yields its socket."""
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        path = Path(folder) / serve.NAME
        with _running([[sys.executable, str(serve.__file__), str(path)]], [path]):
            _wait(path)
            yield path


def wait(purposes: Sequence[str] = WORKERS) -> None:
    """Waits until the servers listen that were started in this process or its parent. Fails when one has ended."""
    for purpose in purposes:
        _wait(Path(os.environ[SOCKETS]) / purpose)


def _wait(path: Path) -> None:
    pid = int(path.with_suffix(".pid").read_text())
    wait_until(lambda: path.exists() or _has_ended(pid), f"{path} does not listen")
    assert path.exists(), f"the fork server for {path.name} has ended; why is on stderr"


@contextmanager
def of_pytest_runs() -> Iterator[None]:
    """While it runs, the runs of pytest that a test starts ask a server for the ranks of their tests, too."""
    others = Path(os.environ[SOCKETS])
    with started(WORKER, ["tests"]):
        for path in (each for each in others.iterdir() if each.suffix != ".pid"):
            (Path(os.environ[SOCKETS]) / path.name).symlink_to(path)
        wait(["tests"])
        yield
    os.environ[SOCKETS] = str(others)


@contextmanager
def started(start: str, purposes: Sequence[str]) -> Iterator[None]:
    """Starts a server for each purpose, which will listen at a socket of this name in a folder. start: its program."""
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        os.environ[SOCKETS] = folder
        paths = [Path(folder) / purpose for purpose in purposes]
        try:
            commands = [
                [sys.executable, "-c", start, "--fork-server", path.name, "--listen", str(path)] for path in paths
            ]
            with _running(commands, paths):
                yield
        finally:
            del os.environ[SOCKETS]


@contextmanager
def _running(commands: Sequence[list[str]], sockets: Sequence[Path]) -> Iterator[None]:
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    alone = os.environ | {"PYTHONPATH": paths} | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    servers = [subprocess.Popen(command, env=alone, preexec_fn=die_with_parent) for command in commands]
    try:
        for server, path in zip(servers, sockets):
            path.with_suffix(".pid").write_text(str(server.pid))
        yield
    finally:
        for server, path in zip(servers, sockets):
            server.kill()
            server.wait()
            path.unlink(missing_ok=True)


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
