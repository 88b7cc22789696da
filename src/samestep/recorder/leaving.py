"""How a rank leaves by itself: the line of its sys.exit, and the exception of a load that its script has caught.

An exception is kept as its text. It counts as the reason only while no optimizer step was taken since.
"""

from __future__ import annotations

import sys
import traceback
from _sitebuiltins import Quitter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import dataloader

from samestep.job.foreign import is_a
from samestep.message import Message, message
from samestep.rank.hooks import Hooks
from samestep.records.call_site import CallRecord, CallSite
from samestep.world.imports import is_users_code

LONGEST = 200  # characters of an exception's text


class Leaving:
    """What is known of why this process leaves. steps_done: returns the optimizer steps taken so far."""

    def __init__(self, steps_done: Callable[[], int]) -> None:
        self._steps_done = steps_done
        self._caught: tuple[int, Message, CallSite | None] | None = None
        self._exit: tuple[int, Message, CallSite | None] | None = None

    def patch_loads(self, hooks: Hooks) -> None:
        """Notes what a DataLoader and torch.load raise: the script may catch it."""

        def new_load(load: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return load(*args, **kwargs)
            except Exception as error:
                if not is_a(error, StopIteration):
                    self._caught = self._steps_done(), described(error), _place_of(error)
                raise

        hooks.attach(torch, "load", new_load, torch.serialization)
        hooks.attach(dataloader._BaseDataLoaderIter, "__next__", new_load)

    def patch_exits(self, hooks: Hooks, noted: Callable[[], None]) -> None:
        """Notes where the script calls sys.exit, exit or quit. noted: called after that."""

        def new_exit(leave: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_exit([value for value in args if not is_a(value, Quitter)], sys.exc_info()[1], calling_place())
            noted()
            return leave(*args, **kwargs)

        hooks.attach(sys, "exit", new_exit)
        hooks.attach(Quitter, "__call__", new_exit)

    def left(self, error: SystemExit) -> None:
        """Notes the exception by which the script has left."""
        self._note_exit([error.code], error.__context__, _place_of(error))

    def _note_exit(self, codes: list[Any], handled: BaseException | None, place: CallSite | None) -> None:
        caught = described(handled) if handled else self._caught_since()
        code = repr(codes[0])[:LONGEST] if codes and codes[0] is not None else ""
        said = message("rank_called_exit", code=code, line=place and said_place(place), caught=caught)
        self._exit = self._steps_done(), said, place

    def _caught_since(self) -> Message | None:
        return self._caught[1] if self._caught and self._caught[0] == self._steps_done() else None

    @property
    def reason(self) -> Message | None:
        """How it leaves; None where that is not known, as where it comes to the script's end."""
        if self._exit and self._exit[0] == self._steps_done():
            return self._exit[1]
        caught = self._caught_since()
        return message("rank_caught_exception", caught=caught) if caught else None

    def calls(self) -> list[CallRecord]:
        """Returns the lines at which it leaves, and of the exception, as records name them."""
        known = [self._exit, self._caught] if self.reason else []
        sites = [entry[2] for entry in known if entry and entry[2]]
        return [CallRecord("leave", "", [site], first=self._steps_done(), last=self._steps_done()) for site in sites]


def described(error: BaseException) -> Message:
    """Returns an exception in words."""
    place = _place_of(error)
    text = (str(error).strip().splitlines() or [""])[0]
    return message("exception_at_line", kind=type(error).__name__, text=text, line=place and said_place(place))


def said_place(place: CallSite) -> str:
    """Returns 'train.py:12, load'."""
    return f"{Path(place.file).name}:{place.line}, {place.function}"


def _place_of(error: BaseException) -> CallSite | None:
    """Returns the innermost line of the user's code that an exception has passed through, or that runs now; else the
    line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if is_users_code(frame.filename)]
    place = None if users else calling_place()
    last = (users or frames)[-1:]
    return place or next((CallSite(frame.filename, frame.lineno or 0, frame.name) for frame in last), None)


def calling_place() -> CallSite | None:
    """Returns the innermost line of the user's code that this thread is at."""
    frame: FrameType | None = sys._getframe(1)
    while frame and not is_users_code(frame.f_code.co_filename):
        frame = frame.f_back
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else None
