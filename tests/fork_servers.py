"""Processes that fork samestep's workers, kept over many commands, which then need not import torch again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.launch.fork_client import SOCKETS

TESTS = Path(__file__).parent
# lightning is imported once for all tests: with torchmetrics, transformers and scipy it takes longer than torch.
START = "import lightning, sys; from samestep.worker import main; main(sys.argv[1:])"


@contextmanager
def fork_servers() -> Iterator[None]:
    """While it runs, every command asks these servers for its workers."""
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        command = [sys.executable, "-c", START, "--fork-server"]
        paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        alone = os.environ | {"PYTHONPATH": paths} | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        sockets = [Path(folder) / of for of in ("ranks", "reference")]
        servers = [subprocess.Popen([*command, path.name, str(path)], env=alone) for path in sockets]
        while not all(path.exists() for path in sockets):
            assert all(server.poll() is None for server in servers), "a fork server has ended"
            time.sleep(0.05)
        os.environ[SOCKETS] = folder
        yield
        os.environ.pop(SOCKETS)
        for server in servers:
            server.kill()
            server.wait()
