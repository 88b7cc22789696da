"""What the parent knows about a job, the engines and this machine: it asks a worker, because it never imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

from samestep.errors import TrainingFailed, UserError
from samestep.launch import fork_client
from samestep.launch.fork_client import ForkedWorker
from samestep.records.files import read, write
from samestep.records.inspection import (
    ANSWER,
    MISTAKE,
    EjectQuestion,
    Inspection,
    Mistake,
    Question,
    Script,
)
from samestep.world.orphans import COMMAND, die_with_parent, this_command

Answer = TypeVar("Answer", Inspection, Script)


def ask(question: Question, deadline_s: float | None = None) -> Inspection:
    """Asks about a job and the engines. Raises UserError with the worker's sentence about what is wrong, TrainingFailed
    where there is no answer within `deadline_s`."""
    return _answer("--inspect", question, Inspection, question.job or "the engines", deadline_s)


def ask_script(question: EjectQuestion) -> str:
    """Asks for the stand-alone script of a job on an engine. Raises UserError as `ask`."""
    return _answer("--eject", question, Script, question.job, None).text


def _answer(
    flag: str, question: Question | EjectQuestion, kind: type[Answer], subject: str, deadline_s: float | None
) -> Answer:
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        asked, answer, mistake, log = (Path(folder) / name for name in ("question.json", ANSWER, MISTAKE, "log.txt"))
        write(asked, question)
        worker = _started([flag, str(asked)], log)
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
        if mistake.exists():
            raise UserError(read(Mistake, mistake).error)
        if not answer.exists():
            said = log.read_text(errors="replace").strip().splitlines()
            raise TrainingFailed(f"the inspection of {subject} ended: {said[-1] if said else 'no word'}")
        return read(kind, answer)


def _started(arguments: list[str], log: Path) -> subprocess.Popen[bytes] | ForkedWorker:
    """A worker, what it prints in `log`: forked where a server runs, else started afresh."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", COMMAND: this_command()}
    server = fork_client.ready_server("ranks") or fork_client.ready_server("reference")
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
