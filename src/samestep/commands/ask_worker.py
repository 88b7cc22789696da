"""Inspects a job, the engines and this machine in a worker process, because the parent never imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TypeVar

from samestep.doctor.records import ProbeQuestion, Probes
from samestep.errors import TrainingFailed, UserError
from samestep.launch import fork_client
from samestep.launch.fork_client import ForkedWorker
from samestep.launch.stacks import place_of
from samestep.message import Message, message
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
from samestep.world.imports import module_arguments
from samestep.world.processes import COMMAND, die_with_parent, this_command, wait_for
from samestep.world.regular_files import open_new

Answer = TypeVar("Answer", Inspection, Script, Probes)


def ask(question: Question, deadline_s: float | None = None, tell_s: float | None = None) -> Inspection:
    """Inspects a job and the engines. Raises UserError with the worker's sentence about a mistake, TrainingFailed where
    the worker does not end within `deadline_s`. tell_s: after so long, it is said at which line the job is."""
    what = message("job_is_being_built", job=question.job) if question.job else message("engines_are_being_looked_at")
    return _answer("--inspect", question, Inspection, what, deadline_s=deadline_s, tell_s=tell_s)


def ask_script(question: EjectQuestion) -> Script:
    """Returns the script of a job on an engine. Raises UserError as `ask`."""
    return _answer("--eject", question, Script, message("job_is_being_built", job=question.job))


def ask_probes(question: ProbeQuestion, deadline_s: float) -> Probes:
    """Returns the facts of the doctor's probes that need torch. Raises TrainingFailed as `ask`."""
    return _answer("--probe", question, Probes, message("torch_is_being_looked_at"), deadline_s=deadline_s)


def _answer(
    flag: str,
    question: Question | EjectQuestion | ProbeQuestion,
    kind: type[Answer],
    what: Message,
    *,
    deadline_s: float | None = None,
    tell_s: float | None = None,
) -> Answer:
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        question_file, answer, mistake, log = (
            Path(folder) / name for name in ("question.json", ANSWER, MISTAKE, "log.txt")
        )
        write(question_file, question)
        worker = _start_worker([flag, str(question_file)], log, deadline_s)
        wait_for(worker, what, partial(place_of, worker.pid, log), deadline_s=deadline_s, tell_s=tell_s)
        if mistake.exists():
            raise UserError(read(Mistake, mistake).error)
        if not answer.exists():
            lines = log.read_text(errors="replace").strip().splitlines()
            raise TrainingFailed(message("inspection_failed", what=what, last_line=lines[-1] if lines else None))
        return read(kind, answer)


def _start_worker(arguments: list[str], log: Path, deadline_s: float | None) -> subprocess.Popen[bytes] | ForkedWorker:
    """Starts a worker with its output in `log`: forked where a fork server runs, else in a new interpreter."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", COMMAND: this_command()}
    for purpose in ("ranks", "reference"):
        if worker := fork_client.fork(purpose, arguments, environment, log, deadline_s):
            return worker
    with open_new(log) as output:  # a file and no pipe, which processes that the job started would keep open
        return subprocess.Popen(
            [sys.executable, *module_arguments("samestep.worker"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            preexec_fn=die_with_parent if sys.platform != "win32" else None,
        )
