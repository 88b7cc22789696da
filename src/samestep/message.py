"""What samestep has to say, as a value: an id, and the figures, names and places that it is about.

Its sentence is made in report/ alone: of a mistake of a script from rules/ID.py, of all else from the catalogues of
report/sentences. Code that finds something out builds the value; tests and other programs read the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any


@dataclass(frozen=True)
class Message:
    """One thing to say.

    id: in plain English, as 'loss_not_divided_by_accumulation'; the name of its sentences in report/sentences. fields:
    what the sentences' {names} stand for, as values of JSON: figures, names, None, lists of these, and other messages.
    english: the English sentence, for those who read a file; '' until report.language.with_english has made it.
    """

    id: str
    fields: dict[str, Any] = field(default_factory=dict)
    english: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", {name: plain_field(value, 1) for name, value in self.fields.items()})

    def __str__(self) -> str:
        """Returns the sentence: in a process that has report.language, in its language; else as it is written."""
        return _sentence(self) if _sentence else self.as_written()

    def as_written(self) -> str:
        """Returns the English sentence where it is known, else the id and the fields: for a log of a rank."""
        if self.english or self.id == AS_SAID:
            return self.english or str(self.fields.get("text", ""))
        return f"{self.id} ({', '.join(f'{name}={value}' for name, value in self.fields.items())})"


_sentence: Callable[[Message], str] | None = None


def render_with(sentence: Callable[[Message], str]) -> None:
    """Makes str() of a message its sentence. Called by report.language, which only the parent has."""
    global _sentence
    _sentence = sentence


def has_sentences() -> bool:
    """Whether str() of a message is its sentence in this process."""
    return _sentence is not None


AS_SAID = "as_said"  # a sentence that comes from elsewhere, as an exception's or another package's; field text


def message(id: str, /, **fields: Any) -> Message:
    """Returns the message with this id and these fields."""
    return Message(id, fields)


def as_said(said: str | Message) -> Message:
    """Returns a message for a sentence that comes from elsewhere; a message stays as it is."""
    return said if isinstance(said, Message) else Message(AS_SAID, {"text": said})


DEEPEST = 20  # values in values: a file may hold thousands, and each is several calls of whoever shows them
MOST_BITS = 2048  # of an integer: Python refuses to write those of thousands of digits
CUT = "…"


def plain_field(value: Any, depth: int = 0) -> Any:
    """Returns a field as a value of JSON, or a message; a message that was read from JSON is one again.

    depth: how many values hold this one. What lies deeper than DEEPEST is left out, as is an integer of over MOST_BITS.
    """
    is_table, is_list = isinstance(value, Mapping), isinstance(value, list | tuple | set | frozenset | range)
    if (is_table or is_list) and depth > DEEPEST:
        return CUT
    if is_table:
        if {"id", "fields"} <= set(value) <= {"id", "fields", "english"} and isinstance(value["fields"], Mapping):
            held = {str(name): plain_field(inner, depth + 1) for name, inner in value["fields"].items()}
            return Message(str(value["id"]), held, str(value.get("english", "")))
        return {str(name): plain_field(inner, depth + 1) for name, inner in value.items()}
    if is_list:
        ordered = sorted(value) if isinstance(value, set | frozenset) else value
        return [plain_field(inner, depth + 1) for inner in ordered]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, int):
        return value if value.bit_length() <= MOST_BITS else CUT
    # A figure of numpy or torch.
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
