"""Runs code of another package, or of a job, that may raise anything, KeyboardInterrupt too, and names what it raises.

A signal that the user, or a scheduler, sends meanwhile stays what it is: Ctrl-C ends the command.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU")  # the signals whose handlers raise


class ForeignError(Exception):
    """Stands for what foreign code has raised that is no Exception, as SystemExit: its __cause__."""


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Makes each error of the block an Exception, and of one that is none a ForeignError; not of one by a signal."""
    came: list[int] = []
    replaced = _noticing(came) if threading.current_thread() is threading.main_thread() else {}
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if came:
            raise
        raise ForeignError(str(error)).with_traceback(error.__traceback__) from error
    finally:
        for number, (own_handler, before) in replaced.items():
            # The block may have set another, which stays.
            if signal.getsignal(number) is own_handler:
                signal.signal(number, before)


def _noticing(came: list[int]) -> dict[int, tuple[Any, Any]]:
    """Sets handlers that note a signal and call the one before. Returns number -> the new handler, the one before."""
    numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    own_handlers = {number: partial(_note, came, handler) for number, handler in before.items()}
    for number, handler in own_handlers.items():
        signal.signal(number, handler)
    return {number: (own_handlers[number], before[number]) for number in own_handlers}


def _note(came: list[int], handler: Callable[[int, Any], Any], number: int, frame: Any) -> None:
    came.append(number)
    handler(number, frame)


def error_line(error: BaseException) -> str:
    """Returns the type of an error and its first line: 'SystemExit: no licence'."""
    raised = error.__cause__ if isinstance(error, ForeignError) and error.__cause__ else error
    lines = str(error).strip().splitlines()
    return f"{type(raised).__name__}{': ' + lines[0] if lines else ''}"
