"""Keeps exceptions of samestep's own code out of the script: what observes a training never ends it."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from samestep.errors import SamestepError, printable
from samestep.job.foreign import is_a
from samestep.message import Message
from samestep.rank.hooks import call_guarded
from samestep.records.record import FAULT, RankError

PACKAGE = Path(__file__).parents[1]


def fault_message(fault: Exception) -> Message:
    """Returns the sentence that names samestep, with the line of its own that has failed."""
    frames = traceback.extract_tb(fault.__traceback__)
    own_frame = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)][-1]
    place = f"samestep/{Path(own_frame.filename).relative_to(PACKAGE)}:{own_frame.lineno}"
    kind, text = type(fault).__name__, printable((str(fault).strip().splitlines() or [""])[0])
    # Also for a process that has no sentences, as the training's.
    english = (
        f"samestep itself has failed, not the script: {kind} ({text}) at {place}; nothing is known of this training"
    )
    return Message(FAULT, {"kind": kind, "text": text, "place": place}, english)


def fault_record(fault: Exception, rank: int) -> RankError:
    """Returns the record of samestep's own failure on a rank."""
    trace = "".join(traceback.format_exception(type(fault), fault, fault.__traceback__))
    return RankError(rank, "crash", fault_message(fault), time.time(), trace, lost_peer=False)


class Guard:
    """Guards hooks and replacements.

    fault: samestep's own exception, which has ended the observation. ended: called with it, once.
    """

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.ended: Callable[[Exception], None] = lambda fault: None

    def begin(self, ended: Callable[[Exception], None]) -> None:
        """Begins an observation."""
        self.fault, self.ended = None, ended

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that torch calls: it raises nothing, and does nothing once the observation has ended."""

        @functools.wraps(function)
        def new_hook(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if self.fault is not None:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if is_a(error, SamestepError):
                    raise
                self.end(error)
                return None

        return new_hook

    def call(self, replacement: Callable[..., Any], function: Callable[..., Any]) -> Any:
        """Calls replacement(function), where `function` is the script's."""
        if self.fault is not None:
            return function()
        return call_guarded(self, replacement, function)

    def end(self, fault: Exception) -> None:
        """Ends the observation: samestep itself has failed."""
        if self.fault is None:
            self.fault = fault
            # The function that tells of the fault may fail, too, as on a full disk.
            with suppress(Exception):
                self.ended(fault)
            # The frames of the exception hold tensors of the training.
            fault.with_traceback(None)


recorder_guard = Guard()  # the guard of the training that this process records
