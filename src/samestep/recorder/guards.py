"""Keeps exceptions of samestep's own code out of the script: what observes a training never ends it.

A patch calls the function of torch that it stands for. What that raises is the script's, and passes. What the patch
raises of itself ends the observation; the script gets what torch's own function returns.
"""

from __future__ import annotations

import functools
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import GeneratorType
from typing import Any

import torch

from samestep.errors import SamestepError, printable
from samestep.job.foreign import is_a
from samestep.message import Message
from samestep.records.record import FAULT, RankError

PACKAGE = Path(__file__).parents[1]
LISTED = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")  # which read their first argument once


@dataclass
class Call:
    """A call of a patch that goes on. original: the function that it stands for; result, error: of that one's call."""

    original: Any
    is_begun: bool = False
    is_done: bool = False
    result: Any = None
    error: BaseException | None = None


def fault_message(fault: Exception) -> Message:
    """Returns the sentence that names samestep, with the line of its own that has failed."""
    frames = traceback.extract_tb(fault.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)][-1]
    place = f"samestep/{Path(own.filename).relative_to(PACKAGE)}:{own.lineno}"
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
    """Guards hooks and patches. fault: samestep's own exception, which has ended the observation. ended: called with
    it, once."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.ended: Callable[[Exception], None] = lambda fault: None
        self._calls = threading.local()

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
                if not _is_own(error):
                    raise
                self._end(error)
                return None

        return new_hook

    def call(self, patch: Callable[..., Any], function: Callable[..., Any]) -> Any:
        """Calls patch(function), where `function` is the script's."""
        original = self._marked(function)
        return self._guarded(patch, original, is_given=True)(original)

    @contextmanager
    def patching(self, places: Iterable[tuple[Any, str]]) -> Iterator[None]:
        """Guards what the block puts at these places."""
        known = [(owner, name, getattr(owner, name)) for owner, name in places if hasattr(owner, name)]
        originals = {id(function): self._marked(function) for *_, function in known}
        for owner, name, function in known:
            setattr(owner, name, originals[id(function)])
        yield
        # One patch may stand at two places, where torch looks for the same function.
        guarded = dict[int, Any]()
        for owner, name, function in known:
            patch, original = getattr(owner, name), originals[id(function)]
            if id(patch) not in guarded:
                guarded[id(patch)] = patch, self._guarded(patch, original, is_listed=name in LISTED)
            setattr(owner, name, function if patch is original else guarded[id(patch)][1])

    def _end(self, fault: Exception) -> None:
        if self.fault is None:
            self.fault = fault
            self.ended(fault)

    def _open_calls(self) -> list[Call]:
        calls: list[Call] | None = getattr(self._calls, "open", None)
        if calls is None:
            calls = self._calls.open = []
        return calls

    def _marked(self, function: Any) -> Any:
        """Returns a function that notes what the script's or torch's own one does."""

        @functools.wraps(function)
        def calls_original(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            calls = self._open_calls()
            call = calls[-1] if calls else Call(None)
            if call.original is not calls_original or call.is_begun:
                call = Call(None)
            call.is_begun = True
            try:
                call.result = function(*args, **kwargs)
            except BaseException as error:
                call.error = error
                raise
            call.is_done = True
            return call.result

        return calls_original

    def _guarded(self, patch: Any, original: Any, *, is_listed: bool = False, is_given: bool = False) -> Any:
        @functools.wraps(patch)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return patch(*args, **kwargs)
            rest = args[is_given:]
            if self.fault is not None:
                return original(*rest, **kwargs)
            if is_listed and args and type(args[0]) is GeneratorType:
                args = rest = [*args[0]], *args[1:]
            calls, call = self._open_calls(), Call(original)
            calls.append(call)
            try:
                return patch(*args, **kwargs)
            except Exception as error:
                if not _is_own(error):
                    raise
                self._end(error)
            finally:
                calls.pop()
            if call.error is not None:
                raise call.error
            return call.result if call.is_done else original(*rest, **kwargs)

        return guarded


def _is_own(error: Exception) -> bool:
    """Whether an exception was raised by samestep by mistake: it has passed through no function of the script's or of
    torch's, and is none that is meant for the user."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_passed = any(code.co_name == "calls_original" and code.co_filename == __file__ for code in codes)
    return not is_passed and not is_a(error, SamestepError)


recorder_guard = Guard()  # of the training that this process records
