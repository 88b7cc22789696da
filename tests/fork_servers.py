"""Processes that fork samestep's workers, kept over many commands, which then need not import torch again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samestep.launch.fork_client import SOCKETS

TESTS = Path(__file__).parent
WORKER = "import sys; from samestep.worker import main; main(sys.argv[1:])"
# For a whole lane, libraries are imported once: lightning, with torchmetrics and scipy, takes longer than torch.
LIBRARIES = "import lightning, accelerate, transformers.trainer" if "PYTEST_XDIST_WORKER" in os.environ else "pass"
OF_A_LANE = f"{LIBRARIES}; {WORKER}"


@contextmanager
def fork_servers(start: str = OF_A_LANE, purposes: Sequence[str] = ("ranks", "reference")) -> Iterator[None]:
    """While it runs, every command asks these servers for its workers. start: their program."""
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder, _listening(Path(folder), start, *purposes):
        os.environ[SOCKETS] = folder
        yield
        os.environ.pop(SOCKETS)


@contextmanager
def of_pytest_runs() -> Iterator[None]:
    """While it runs, the runs of pytest that a test starts ask a server for the ranks of their tests, too."""
    with _listening(Path(os.environ[SOCKETS]), WORKER, "tests"):
        yield


@contextmanager
def _listening(folder: Path, start: str, *purposes: str) -> Iterator[None]:
    """Runs a server for each purpose, which listens at a socket of this name in `folder`. start: its program."""
    command = [sys.executable, "-c", start, "--fork-server"]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    alone = os.environ | {"PYTHONPATH": paths} | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    sockets = [folder / of for of in purposes]
    servers = [subprocess.Popen([*command, path.name, str(path)], env=alone) for path in sockets]
    while not all(path.exists() for path in sockets):
        assert all(server.poll() is None for server in servers), "a fork server has ended"
        time.sleep(0.05)
    yield
    for server, path in zip(servers, sockets):
        server.kill()
        server.wait()
        path.unlink(missing_ok=True)
