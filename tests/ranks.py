"""Ranks that stay between proofs, for tests: each with a deadline, its stack on the way out, killed by its pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.record import Record
from samestep.trace import Expectation
from samestep.verify import TRAININGS, Verdict, judge

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"
DEADLINE_S = 120
PLAIN = {"replicas": 1, "split": "even", "buffers": "rank0", "rounds_to": None}


class RanksFailed(Exception):
    """A rank raised, died or overran its deadline; the message holds what it said."""


class Ranks:
    """`size` ranks that import samestep from `source`. A context manager; they have ended when it ends."""

    def __init__(self, size: int, source: Path = SOURCE) -> None:
        self.size, self.source = size, source
        self._folder = tempfile.TemporaryDirectory(prefix="samestep-ranks-")
        self._ranks: list[subprocess.Popen[str]] = []
        self._count = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def work(self, plan: Mapping[str, Any]) -> Record:
        """Sends one plan to all ranks and waits for all their records."""
        if not self._ranks:
            self._start()
        self._count += 1
        folder = Path(self._folder.name) / f"plan{self._count}"
        folder.mkdir()
        path = folder / "plan.json"
        path.write_text(json.dumps({"out": str(folder), **plan}))
        for rank in self._ranks:
            assert rank.stdin
            rank.stdin.write(f"{path}\n")
            rank.stdin.flush()
        record, until = Record(folder), time.monotonic() + DEADLINE_S
        while not all((folder / f"rank{r}.json").exists() for r in range(self.size)):
            error = record.error()
            late = time.monotonic() > until
            gone = [r for r, process in enumerate(self._ranks) if process.poll() is not None]
            if error or late or gone:
                said = self._end()
                raise RanksFailed(error["traceback"] if error else f"late: {late}, gone: {gone}\n{said}")
            time.sleep(0.005)
        return record

    def _start(self) -> None:
        meeting = Path(self._folder.name) / f"meeting{self._count}"
        for rank in range(self.size):
            environment = os.environ | {
                "PYTHONPATH": f"{self.source}:{HERE}:{HERE / 'mutations'}",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "SAMESTEP_INIT_METHOD": f"file://{meeting}",
                "OMP_NUM_THREADS": "1",
            }
            said = open(Path(self._folder.name) / f"said{rank}", "a")  # noqa: SIM115 - the rank's own
            command = [sys.executable, str(HERE / "serve.py")]
            self._ranks.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=said, text=True)
            )

    def _end(self) -> str:
        """Asks each rank for its stack, kills it, returns what all said."""
        for process in self._ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.2 if self._ranks else 0)
        for process in self._ranks:
            process.kill()
            process.wait()
        self._ranks = []
        return "\n".join(path.read_text() for path in sorted(Path(self._folder.name).glob("said*")))


def reference_plan(job: str, replicas: int, settings: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The plan of the reference for DDP's layout of `replicas` replicas."""
    plan = {"job": job, "settings": dict(settings or {}), "trainings": TRAININGS, "steps": 8}
    return plan | {"replicas": replicas, "layouts": [PLAIN | {"replicas": replicas}]}


def proof_plan(
    expectation: Expectation, job: str, engine: str, replicas: int, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The plan of an engine's proof, as the reference found that it must be."""
    each = {"kind": "prove", "steps": 8, "replicas": replicas}
    each |= {key: expectation.facts[key] for key in ("dtype", "sgd_lr")}
    trainings = [each | {"name": name} for name in TRAININGS]
    return {"job": job, "settings": dict(settings or {}), "engine": engine, "trainings": trainings}


def prove(judge_rank: Ranks, ranks: Ranks, job: str, engine: str, settings: Mapping[str, str] | None = None) -> Verdict:
    """The verdict on `engine` over all of `ranks`."""
    expectation = Expectation(judge_rank.work(reference_plan(job, ranks.size, settings)), 0)
    return judge(expectation, ranks.work(proof_plan(expectation, job, engine, ranks.size, settings)))
