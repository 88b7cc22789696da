"""What the parent knows about a job, the engines and this machine: it asks a worker, because it never imports torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import TrainingFailed, UserError
from samestep.launch import fork_client
from samestep.launch.fork_client import ForkedWorker
from samestep.world.orphans import COMMAND, die_with_parent, this_command


def ask(
    job: str | None = None,
    settings: Mapping[str, str] | None = None,
    *,
    device: str = "auto",
    replicas: int | None = None,
    machines: int = 1,
    steps: int = 8,
    deadline_s: float | None = None,
    engines: Sequence[str] = (),
    engine_settings: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """{devices, machine, replicas, engines, job}. Raises UserError with the worker's sentence about what is wrong.

    replicas: how many an engine would lay out on each of `machines`; None: one for each GPU, or 2 on a CPU.
    steps: of the proof, whose subset is inspected too. deadline_s: after it, the question is given up.
    engines: those asked for, all where none; engine_settings: texts of --set-engine, checked against them.
    """
    query = {
        "job": job,
        "settings": dict(settings or {}),
        "device": device,
        "replicas": replicas,
        "machines": machines,
        "steps": steps,
        "engines": list(engines),
        "engine_settings": dict(engine_settings or {}),
    }
    return _answer("--inspect", query, job or "the engines", deadline_s)


def script(
    job: str, settings: Mapping[str, str], engine: str, engine_settings: Mapping[str, str], size: int, file: str
) -> str:
    """The stand-alone script of a job on an engine. file: its name, for the launch line that it tells."""
    query = {"job": job, "settings": dict(settings), "engine": engine, "engine_settings": dict(engine_settings)}
    text: str = _answer("--eject", {**query, "size": size, "file": file}, job, None)["script"]
    return text


def _answer(flag: str, query: Mapping[str, Any], subject: str, deadline_s: float | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        asks, answer, log = (Path(folder) / name for name in ("query.json", "answer.json", "log.txt"))
        asks.write_text(json.dumps({**query, "answer": str(answer)}))
        worker = _started([flag, str(asks)], log)
        try:
            worker.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise TrainingFailed(
                f"asking {subject} for its sizes did not end within {deadline_s:.0f} s; "
                "see what the job does when it is built, or give more with --deadline"
            ) from None
        finally:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        if not answer.exists():
            said = log.read_text(errors="replace").strip().splitlines()
            raise TrainingFailed(f"the inspection of {subject} ended: {said[-1] if said else 'no word'}")
        found: dict[str, Any] = json.loads(answer.read_text())
    if found["error"]:
        raise UserError(found["error"])
    return found


def _started(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes] | ForkedWorker:
    """A worker, what it prints in `log`: forked where a server runs, else started afresh."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", COMMAND: this_command()}
    server = fork_client.server("ranks") or fork_client.server("reference")
    if server:
        return server.fork(arguments, environment, log)
    with open(log, "wb") as output:  # no pipe: what the job has started would keep it open
        return subprocess.Popen(
            [sys.executable, "-m", "samestep.worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            preexec_fn=die_with_parent if sys.platform != "win32" else None,
        )
