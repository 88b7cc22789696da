"""Turns a command's errors into exit codes, each with one sentence on stderr."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, cast, get_type_hints

import typer

from samestep.errors import ObservationFailed, TrainingFailed, UserError, say
from samestep.message import message

if TYPE_CHECKING:  # an import that takes longer than the help of a command may
    from samestep.records.findings import CheckResults, DiffResults
    from samestep.records.results import CompareResults
    from samestep.records.run_results import RunResults


NOT_JUDGED = 3  # what could be judged is right, but the proof needs answers that could not be given


def exit_code(results: CompareResults, *, strict: bool = False) -> int:
    """Returns 1 where an engine differs or fails, or the job makes a mistake on several ranks, or may; else 0.

    Also 1 when nothing is proven: a script that verifies one engine must not take 'unavailable' for 'same'. strict:
    also where N ranks train differently from one process as expected.
    """
    answer = results.same_as_one_process.answer if results.same_as_one_process else "yes"
    wrong = {"no", "not known"} | ({"no, as expected"} if strict else set())
    bad = any(row.verdict in ("differs", "failed") for row in results.engines)
    return int(bad or answer in wrong or not any(row.proven for row in results.engines))


def exit_code_of_check(results: CheckResults | DiffResults, *, allow_unknown: bool = False) -> int:
    """Returns 0 where all that a proof needs is right, 1 where something differs, and 3 where nothing does but a part
    that a proof needs could not be judged. allow_unknown: 0 for that, too."""
    return {"right": 0, "differs": 1}.get(results.answer, 0 if allow_unknown else NOT_JUDGED)


def exit_code_of_run(results: RunResults) -> int:
    """Returns 1 where a spot check has found a step that differs, 130 after a stop that was asked for, else 0."""
    if any(check.verdict == "differs" for check in results.spot_checks):
        return 1
    return 130 if results.stopped == "requested" else 0


def _check_current_folder() -> None:
    """Raises UserError where the current folder has been removed."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(f"the current folder cannot be used ({error.strerror}); cd to one that exists") from None


def _remedy(error: OSError) -> str:
    """Returns what to do about an error that the machine's limits or permissions cause; '' for any other."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the number of open files (ulimit -n)"
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return "raise the number of processes (ulimit -u) or the memory that it may use (ulimit -v)"
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return "set TMPDIR to a folder that takes files"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "let this user read and write it, or name another"
    return ""


Lang = Annotated[
    str,
    typer.Option(metavar="zh|en", help="The language of messages; by default that of SAMESTEP_LANG, or the locale's."),
]


def with_exit_code(command: Callable[..., int]) -> Callable[..., NoReturn]:
    """Makes a command exit with the code that it returns, with 2 for a user's mistake, or with 1 for a failed training;
    prints the error's sentence. Gives it the option --lang."""

    @functools.wraps(command)
    def wrapper(*args: Any, lang: str = "", **kwargs: Any) -> NoReturn:
        _handle_signals()
        # Imported here: these imports take longer than a help may.
        from samestep.records.files import naming_full_disks
        from samestep.report import language

        try:
            if lang:
                language.use_language(lang)
            _check_current_folder()
            with naming_full_disks():
                code = command(*args, **kwargs)
        except UserError as error:
            from samestep.commands.results_folder import remove_unused_folders

            remove_unused_folders()
            say(error.message)
            code = 2
        except TrainingFailed as error:
            say(error.message)
            code = NOT_JUDGED if isinstance(error, ObservationFailed) else 1
        except KeyboardInterrupt:
            say(message("command_was_interrupted"))
            code = 130
        except OSError as error:
            remedy = _remedy(error)
            if not remedy:
                raise
            name = f"{error.filename}: " if error.filename else ""
            say(message("machine_does_not_do_what_is_needed", error=f"{name}{error.strerror}", remedy=remedy))
            code = 2
        raise typer.Exit(code)

    signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    option = inspect.Parameter("lang", inspect.Parameter.KEYWORD_ONLY, default="", annotation=Lang)
    wrapper.__signature__ = signature.replace(parameters=[*parameters, option])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"lang": Lang}
    return wrapper


# Signals that this command was started to ignore, as by trap '' TERM in a shell. Python ignores two by itself.
ignored_at_start: set[int] = set()


def _handle_signals() -> None:
    """Makes the signals that end a command raise SystemExit, so that finally blocks end what was started."""
    ended: list[int] = []
    ignored_at_start.update(number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)

    def end(number: int, _: object) -> None:
        if not ended:  # both shell and kernel may tell that a terminal has gone: the second must not end the ending
            ended.append(number)
            sys.exit(128 + number)

    for name in ("SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)  # a scheduler's request to stop; trainings handle it
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGXCPU"):
        number = getattr(signal, name, None)
        if number and (number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN):  # as under nohup
            signal.signal(number, end)


GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended; a terminal has been closed


class Droppable:
    """A text stream that drops everything once writing to it fails.

    any_error: also where its disk is full, for progress messages. Otherwise only where its reader has gone.
    """

    def __init__(self, stream: TextIO, *, any_error: bool) -> None:
        self._stream, self._any_error = stream, any_error

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Sends this and all later output nowhere."""
        if not self._any_error and error.errno not in GONE:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive_lost_output() -> None:
    """Keeps this process running where its output cannot be written: results are files, stderr has messages only."""
    sys.stdout = cast(TextIO, Droppable(_opened(sys.stdout), any_error=False))
    sys.stderr = cast(TextIO, Droppable(_opened(sys.stderr), any_error=True))


def _opened(stream: TextIO | None) -> TextIO:
    """Returns the stream; one that goes nowhere for one that the shell has closed (2>&-), which Python has as None.

    A character that the terminal's encoding does not have, or that is none, is printed as its escape.
    """
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream or open(os.devnull, "w")
