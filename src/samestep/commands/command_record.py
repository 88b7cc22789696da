"""Writes down which command fills a folder of results, and how it ended: what `samestep runs` lists."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from samestep.commands.command_options import LaunchOptions
from samestep.commands.options import arguments
from samestep.errors import TrainingFailed, UserError, printable_message
from samestep.message import Message, as_said
from samestep.records.files import write
from samestep.records.redaction import redacted
from samestep.records.runs import COMMAND, CommandRecord
from samestep.report.language import with_english


def words_of(command: str, options: LaunchOptions, job: str = "") -> tuple[str, ...]:
    """Returns a command line with these options, whether they were given there or in Python; without --out.

    job: as workers load it; '': the command has none.
    """
    words = arguments(options, type(options), without=["out"])  # `samestep runs` adds it where the folder is the same
    return ("samestep", command, *([job] if job else []), *words)


@contextmanager
def recorded(folder: Path, words: tuple[str, ...], *, writes: bool = True) -> Iterator[None]:
    """Keeps command.json in `folder` while the block runs, and how it ends. writes: whether this command does."""
    record = CommandRecord(tuple(redacted(words)), os.getcwd(), time.time())

    def keep(outcome: Literal["finished", "failed", "interrupted"] | None, reason: Message | None = None) -> None:
        reason = reason and printable_message(with_english(reason))
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
        keep("failed", error.message)
        raise
    except BaseException as error:
        keep("failed", as_said(f"{type(error).__name__}: {error}"))
        raise
    keep("finished")
