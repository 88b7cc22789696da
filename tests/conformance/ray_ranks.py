"""Ranks that TorchTrainer has started, kept between proofs: what tests/ranks.py keeps, in workers of Ray Train."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from budget import budget
from ranks import DEADLINE_IMPORTS, SOURCE, RanksFailed
from samestep.records.files import write
from samestep.records.plan import Plan
from samestep.records.record import Record

TESTS = Path(__file__).parents[1]


class RayRanks:
    """`size` workers of one TorchTrainer. A context manager; they have ended when it ends."""

    def __init__(self, size: int) -> None:
        self.size, self._count = size, 0
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-tests-")
        self._trainer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RayRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._trainer:
            self._end(self._trainer)
        self._folder.cleanup()

    def work(self, plan: Plan) -> Record:
        """Sends one plan to all ranks, and waits for all their records."""
        self._trainer = self._trainer or self._start()
        self._count += 1
        folder = Path(self._folder.name) / f"plan{self._count}"
        folder.mkdir()
        write(folder / "plan.json", replace(plan, out=str(folder)))
        for pipe in self._pipes:
            os.write(pipe, f"Plan {folder / 'plan.json'}\n".encode())
        record, until = Record(folder), time.monotonic() + budget(DEADLINE_IMPORTS)
        while not all((folder / f"rank{rank}.json").exists() for rank in range(self.size)):
            error = record.error()
            if error or time.monotonic() > until or self._trainer.poll() is not None:
                self._end(self._trainer)
                self._trainer = None
                raise RanksFailed(error.traceback if error else (Path(self._folder.name) / "log").read_text())
            time.sleep(0.01)
        return record

    def _start(self) -> subprocess.Popen[bytes]:
        names = [f"{self._folder.name}/plans{rank}" for rank in range(self.size)]
        for name in names:
            Path(name).unlink(missing_ok=True)
            os.mkfifo(name)
        self._pipes = [os.open(name, os.O_RDWR) for name in names]
        path = os.pathsep.join(map(str, (SOURCE, TESTS, TESTS / "mutations")))
        environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        with open(f"{self._folder.name}/log", "wb") as log:
            line = [sys.executable, "-m", "conformance.ray_ranks", str(self.size), self._folder.name]
            return subprocess.Popen(line, env=environment, stdout=log, stderr=log)

    def _end(self, trainer: subprocess.Popen[bytes]) -> None:
        for process in [*psutil.Process(trainer.pid).children(recursive=True), trainer] if not trainer.poll() else []:
            process.kill()
        trainer.wait()
        for pipe in self._pipes:
            os.close(pipe)


def serve_rank(folder: str) -> int:
    """Runs one plan after the other, in a worker of Ray Train."""
    from serve import serve

    sys.path.insert(0, str(SOURCE))
    serve(f"{folder}/plans{os.environ['RANK']}")
    return 1  # it ends after an error alone


if __name__ == "__main__":
    from conformance import ray_ranks  # the ranks cannot import __main__
    from samestep.tasks.ray_ranks import start

    start(int(sys.argv[1]), partial(ray_ranks.serve_rank, sys.argv[2]), sys.argv[2])
