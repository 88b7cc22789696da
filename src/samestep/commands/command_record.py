"""Writes down which command fills a folder of results, and how it ended: what `samestep runs` lists."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from samestep.commands.machine_options import MachineOptions
from samestep.commands.options import arguments
from samestep.commands.setup import Setup
from samestep.commands.train_options import ScoreOptions, TrainOptions
from samestep.errors import TrainingFailed, UserError
from samestep.records.files import write
from samestep.records.runs import COMMAND, CommandRecord


def words_of(command: str, setup: Setup, training: TrainOptions | ScoreOptions | None = None) -> tuple[str, ...]:
    """Returns a command line that does what was asked, on the command line or in Python; without --out."""
    words = ["samestep", command]
    if isinstance(training, ScoreOptions):
        words += [str(training.weights)]
        words += ["--predictions", str(training.predictions)] if training.predictions else []
    words += [setup.job]
    given: dict[str, str | float | None] = {
        "--engine": ",".join(setup.engines) if command != "evaluate" else "",
        "--nproc": setup.nproc,
    }
    given |= {"--launcher": ",".join(setup.launchers), "--device": "" if setup.device == "auto" else setup.device}
    given |= {"--deadline": setup.deadline_s, "--stall": setup.stall_s}
    if command in ("verify", "compare"):
        given |= {"--steps": setup.steps}
    if command == "compare":
        given |= {"--rounds": setup.rounds, "--measured-steps": setup.measured_steps}
        given |= {"--warmup-steps": setup.warmup_steps}
    words += ["--resume"] if setup.resume else []
    if setup.resume:
        given |= {"--resume-nproc": setup.resume.nproc, "--resume-engine": setup.resume.engine}
    for flag, value in given.items():
        words += [flag, str(value)] if value not in (None, "") else []
    for flag, values in (("--set", setup.settings), ("--set-engine", setup.engine_settings)):
        words += [word for name, text in values.items() for word in (flag, f"{name}={text}")]
    if isinstance(training, TrainOptions):
        words += arguments(training, TrainOptions)
    return (*words, *arguments(setup.machines, MachineOptions))


@contextmanager
def recorded(folder: Path, words: tuple[str, ...], *, writes: bool = True) -> Iterator[None]:
    """Keeps command.json in `folder` while the block runs, and how it ends. writes: whether this command does."""
    record = CommandRecord(words, os.getcwd(), time.time())

    def keep(outcome: Literal["finished", "failed", "interrupted"] | None, reason: str | None = None) -> None:
        if writes:
            with suppress(OSError):  # a note: no disk that is full may end a command for it
                write(folder / COMMAND, replace(record, outcome=outcome, reason=reason))

    keep(None)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        keep("interrupted")
        raise
    except (UserError, TrainingFailed) as error:
        keep("failed", str(error))
        raise
    except BaseException as error:
        keep("failed", f"{type(error).__name__}: {error}")
        raise
    keep("finished")
