"""Ranks that Ray Train's TorchTrainer has started, for tests/ranks.py: python tests/ray_ranks.py SIZE FOLDER."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

import psutil


def started(size: int, folder: Path, path: Sequence[str]) -> list[tuple[psutil.Process, IO[str]]]:
    """Starts a TorchTrainer. Returns its process and the pipe of plans, once for each rank.

    path: from which ranks import, samestep's source first.
    """
    names = [folder / f"plans{rank}" for rank in range(size)]
    for name in names:
        name.unlink(missing_ok=True)
        os.mkfifo(name)
    pipes = [os.open(name, os.O_RDWR) for name in names]  # both ends: opening waits for nobody
    environment = {**os.environ, "PYTHONPATH": ":".join(path), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "wb") as log:
        line = [sys.executable, __file__, str(size), str(folder)]
        trainer = psutil.Popen(line, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    return [(trainer, os.fdopen(pipe, "w")) for pipe in pipes]


def serve_rank(folder: str) -> int:
    """Runs one plan after the other, in a worker of Ray Train."""
    from serve import serve

    sys.path.insert(0, os.environ["PYTHONPATH"].partition(":")[0])
    serve(f"{folder}/plans{os.environ['RANK']}")
    return 1  # it ends after an error alone


if __name__ == "__main__":
    import ray_ranks  # the ranks cannot import __main__
    from samestep.tasks.ray_ranks import start
    from samestep.world.processes import die_with_parent

    die_with_parent()
    start(int(sys.argv[1]), partial(ray_ranks.serve_rank, sys.argv[2]), sys.argv[2])
