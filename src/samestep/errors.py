"""The errors that a user may see: each is one sentence that names what was wrong and what to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence


class UserError(Exception):
    """A mistake in what the user gave us. The command prints the sentence and exits with 2."""


class Refused(UserError):
    """The job asks for something that a layer or an engine cannot do; the sentence says which and what helps."""


class NotFinite(UserError):
    """A loss that is infinite or no number."""


class LostPeer(Exception):
    """Another rank has gone. The sentence names it and its machine; `ranks` are the lost ones."""

    def __init__(self, sentence: str, ranks: list[int]) -> None:
        super().__init__(sentence)
        self.ranks = ranks


class TrainingFailed(Exception):
    """A worker died or raised. The command prints the sentence and exits with 1."""


class LoadingFailed(Exception):
    """A sample could not be had, or a process that loads has died: one sentence. The command exits with 1."""


def add_note(error: BaseException, text: str) -> None:
    """BaseException.add_note, which Python has from 3.11 on; before, tracebacks do not show it."""
    error.__notes__ = [*notes(error), text]  # type: ignore[attr-defined]


def notes(error: BaseException) -> list[str]:
    """What add_note has added."""
    return list(getattr(error, "__notes__", ()))


def not_a_scalar(shape: list[int]) -> UserError:
    """The mistake of a criterion that returns more than one number."""
    return UserError(
        f"the criterion returned a tensor of shape {shape}, not a scalar; "
        "return the mean over the rows, for example with reduction='mean'"
    )


def not_per_row(name: str, shape: list[int], rows: int) -> UserError:
    """The mistake of a metric that is a mean already, which could not be summed exactly."""
    return UserError(
        f"the metric '{name}' returned a tensor of shape {shape} for {rows} rows; "
        "return one value for each row, for example output.argmax(1) == batch.targets"
    )


def first_few(names: Sequence[str]) -> str:
    """'a, b, c, d …': the first four, and a sign where there are more."""
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def nearest(word: str, known: list[str]) -> str:
    """The tail of a sentence about an unknown name: the closest known one, or all of them."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are: {', '.join(known)}"


def say(sentence: str) -> None:
    """Prints one sentence of ours on stderr."""
    print(f"samestep: {sentence}", file=sys.stderr)
