"""How a command ends: its exit code, and one sentence where something was wrong."""

from __future__ import annotations

import errno
import functools
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec

import typer

from samestep.errors import TrainingFailed, UserError, say

P = ParamSpec("P")


def with_exit_code(command: Callable[P, int]) -> Callable[P, NoReturn]:
    """Wraps a command: it exits with the code that it returns, with 2 for a user's mistake and 1 for a training that
    fails, each told in one sentence."""

    @functools.wraps(command)
    def ended(*args: P.args, **kwargs: P.kwargs) -> NoReturn:
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler's wish to stop; a training heeds it
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what we started is ended on the way out
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's
            signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
        try:
            code = command(*args, **kwargs)
        except UserError as error:
            say(str(error))
            code = 2
        except TrainingFailed as error:
            say(str(error))
            code = 1
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            name = error.filename or "a file"
            say(f"{name} cannot be written ({error.strerror}); make room, or choose another --out")
            code = 2
        except KeyboardInterrupt:
            say("interrupted; everything that was started has ended")
            code = 130
        raise typer.Exit(code)

    return ended
