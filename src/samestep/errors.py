"""The errors that a user sees: each is one sentence that names the problem and its fix."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence

from samestep.message import Message, as_said


class UserError(Exception):
    """A mistake in the user's input. The command prints the sentence and exits with 2.

    said: the sentence, or a message whose sentence report/ makes.
    """

    def __init__(self, said: str | Message = "") -> None:
        super().__init__(said)
        self.message = said if isinstance(said, Message) else as_said(said)


class Refused(UserError):
    """A job that needs something that a layer or an engine cannot do. The sentence names it and the fix."""


class NotFinite(UserError):
    """A loss, or a weight, that is infinite or NaN."""


class LostPeer(Exception):
    """Another rank has ended or cannot be reached. The sentence names it and its machine; ranks: the lost ranks."""

    def __init__(self, sentence: str, ranks: list[int]) -> None:
        super().__init__(sentence)
        self.ranks = ranks


class TrainingFailed(Exception):
    """A worker died or raised an exception. The command prints the sentence and exits with 1."""


class ReplicasDiffer(Exception):
    """The ranks' weights are not the same any more. The command prints the sentence and exits with 1."""


class LoadingFailed(Exception):
    """Loading a sample failed, or a loader process has died. The command prints the sentence and exits with 1."""


def add_note(error: BaseException, text: str) -> None:
    """Adds a note to an exception, as Python 3.11's BaseException.add_note; older tracebacks do not show it."""
    error.__notes__ = [*notes(error), text]  # type: ignore[attr-defined]


def notes(error: BaseException) -> list[str]:
    """Returns the notes that add_note has added."""
    return list(getattr(error, "__notes__", ()))


def not_a_scalar(shape: list[int]) -> UserError:
    """Returns the error of a criterion that does not return a scalar."""
    return UserError(
        f"the criterion returned a tensor of shape {shape}, not a scalar; "
        "return the mean over the rows, for example with reduction='mean'"
    )


def not_per_row(name: str, shape: list[int], rows: int) -> UserError:
    """Returns the error of a metric without one value for each row; means of batches cannot be added exactly."""
    return UserError(
        f"the metric '{name}' returned a tensor of shape {shape} for {rows} rows; "
        "return one value for each row, for example output.argmax(1) == batch.targets"
    )


def first_few(names: Sequence[str]) -> str:
    """Returns 'a, b, c, d …': the first four names, and an ellipsis where there are more."""
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def nearest(word: str, known: list[str]) -> str:
    """Returns a hint for an unknown name: the closest known name, or all of them."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are: {', '.join(known)}"


# Unicode's categories of what moves a cursor, turns the direction of text, or is no character: control characters,
# formats, lone surrogates, unassigned ones, separators of lines and of paragraphs.
ACTING = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}
JOINERS = "\u200c\u200d"  # formats that words of some languages, and emoji, are written with
LONGEST_LINE, LONGEST_MESSAGE = 2000, 50_000  # characters


def printable(text: object, limit: int = LONGEST_LINE, *, lines: bool = False) -> str:
    r"""Returns text from elsewhere as a line that is safe to print: '\x1b[31mred\nnext' for a colour and a new line.

    What would act on a terminal or a page is written as its escape. Longer texts are cut at `limit`, and end in '…'.
    lines: newlines and tabs stay, for text of several lines.
    """
    whole = text if isinstance(text, str) else str(text)
    shown = whole if len(whole) <= limit else f"{whole[: limit - 1]}…"
    if shown.isprintable():
        return shown
    return "".join(_visible(character) if _acts(character, lines) else character for character in shown)


def _acts(character: str, lines: bool) -> bool:
    if character in JOINERS or (lines and character in "\n\t"):
        return False
    return unicodedata.category(character) in ACTING


def _visible(character: str) -> str:
    return character.encode("unicode_escape").decode()


def say(sentence: str) -> None:
    """Prints a message of samestep on stderr. Its later lines are indented: none looks like a message of its own."""
    text = printable(sentence, LONGEST_MESSAGE, lines=True).replace("\n", "\n  ")
    print(f"samestep: {text}", file=sys.stderr)
