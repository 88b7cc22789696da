"""The errors that a user sees: each says what the problem is and its fix, as a message or a sentence."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

from samestep.message import AS_SAID, Message, as_said, has_sentences, message

SAID_BY = "samestep: "  # begins each line that say() prints


class SamestepError(Exception):
    """An error that a user sees. said: a message, whose sentence report/ makes, or the sentence itself."""

    def __init__(self, said: str | Message = "") -> None:
        super().__init__(said)
        self.message = as_said(said)

    def __str__(self) -> str:
        """Returns the sentence in the parent, or where it is known; else the message as a line for message_in()."""
        return as_line(self.message)


class UserError(SamestepError):
    """A mistake in the user's input. The command exits with 2."""


class Refused(UserError):
    """A job that needs something that a layer or an engine cannot do. The message names it and the fix."""


class NotFinite(UserError):
    """A loss, or a weight, that is infinite or NaN."""


class LostPeer(SamestepError):
    """Another rank has ended or cannot be reached. The message names it and its machine; ranks: the lost ranks."""

    def __init__(self, said: str | Message, ranks: list[int]) -> None:
        super().__init__(said)
        self.ranks = ranks


class TrainingFailed(SamestepError):
    """A worker died or raised an exception. The command exits with 1."""


class ObservationFailed(TrainingFailed):
    """samestep itself has failed, and the training was not. The command exits with 3."""


class ReplicasDiffer(SamestepError):
    """The ranks' weights are not the same any more. The command exits with 1."""


class LoadingFailed(SamestepError):
    """Loading a sample failed, or a loader process has died. The command exits with 1."""


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


# What users of other libraries call what an engine here does.
ENGINES_OF_OTHERS = {
    "apex": "amp",
    "bagua": "ddp",
    "byteps": "ddp",
    "fsdp2": "fsdp",
    "horovod_torch": "horovod",
    "huggingface": "hf",
    "megatron": "tensor",
    "trainer": "hf",
    "transformers": "hf",
}


def nearest_engine(word: str, known: list[str]) -> Message:
    """Returns a hint for an unknown engine: the one that does what a library of this name does, or the nearest."""
    engine = ENGINES_OF_OTHERS.get(word.lower())
    return message("engine_of_another_name", engine=engine) if engine in known else nearest_name(word, known)


def nearest_name(word: str, known: list[str], otherwise: Message | None = None) -> Message:
    """Returns a hint for an unknown name: the closest known name; without one `otherwise`, or all names."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    if close:
        return message("did_you_mean", name=close[0])
    return otherwise or message("known_names", names=known)


def nearest(word: str, known: list[str]) -> str:
    """Returns the hint as an English text, for an error that a user's own Python shows."""
    hint = nearest_name(word, known)
    names = hint.fields.get("names")
    return f"did you mean '{hint.fields['name']}'?" if names is None else f"known are: {', '.join(names)}"


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
    full_text = text if isinstance(text, str) else str(text)
    shortened = full_text if len(full_text) <= limit else f"{full_text[: limit - 1]}…"
    if shortened.isprintable():
        return shortened
    return "".join(_visible(character) if _acts(character, lines) else character for character in shortened)


def _acts(character: str, lines: bool) -> bool:
    if character in JOINERS or (lines and character in "\n\t"):
        return False
    return unicodedata.category(character) in ACTING


def _visible(character: str) -> str:
    return character.encode("unicode_escape").decode()


def as_line(said: Message) -> str:
    """Returns a message's sentence in the parent, or where it is known; else its line for message_in()."""
    return str(said) if has_sentences() or said.english or said.id == AS_SAID else sent_line(said)


def sent_line(said: Message) -> str:
    """Returns a message as a line, its id and fields, that another process reads with message_in()."""
    return f"{said.id} {json.dumps(said.fields, default=vars)}"


def message_in(line: str) -> Message | None:
    """Returns the message that sent_line() has written; None for any other line."""
    match = re.fullmatch(r"([a-z][a-z0-9_]*) (\{.*\})", line.strip())
    try:
        return Message(match[1], json.loads(match[2])) if match else None
    except (ValueError, RecursionError):
        return None


def printable_message(said: Message) -> Message:
    """Returns a message whose texts are safe to print: see printable."""

    def safe(value: Any) -> Any:
        if isinstance(value, str):
            return printable(value, LONGEST_MESSAGE, lines=True)
        if isinstance(value, Message):
            return printable_message(value)
        if isinstance(value, dict):
            return {name: safe(inner) for name, inner in value.items()}
        return [*map(safe, value)] if isinstance(value, list) else value

    return Message(said.id, safe(said.fields), safe(said.english))


def say(said: str | Message) -> None:
    """Prints a sentence or a message on stderr; in a rank's log a message is a line, of which the command makes the
    sentence when it shows the log.

    Its later lines are indented: none looks like a message of its own.
    """
    line = as_line(said) if isinstance(said, Message) else said
    text = printable(line, LONGEST_MESSAGE, lines=True).replace("\n", "\n  ")
    print(f"{SAID_BY}{text}", file=sys.stderr)
