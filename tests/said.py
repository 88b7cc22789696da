"""What is said in tests: messages by their ids and fields, whatever their sentences are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from samestep.errors import SamestepError, UserError, message_in
from samestep.message import Message, plain_field
from samestep.report.language import OPTIONAL, names_of, templates_of, text


def says(said: Message | None, identity: str, **fields: Any) -> None:
    """Asserts that a message has this id, and these fields among its own."""
    assert said is not None and said.id == identity, said
    given = {name: said.fields.get(name) for name in fields}
    assert given == {name: plain_field(value) for name, value in fields.items()}, said


@contextmanager
def refuses(identity: str, kind: type[SamestepError] = UserError, **fields: Any) -> Iterator[None]:
    """Asserts that the block raises an error whose message has this id, and these fields among its own."""
    with pytest.raises(kind) as raised:
        yield
    says(raised.value.message, identity, **fields)


def tells(printed: str, identity: str, **fields: Any) -> bool:
    """Returns whether a text that a user reads holds the English sentence of this id, with these fields; other fields
    may be anything."""
    templates = templates_of(identity)
    assert templates is not None, f"{identity} has no sentence"
    known = {name: f"\0{name}\0" for name in names_of(templates["en"])} | Message(identity, fields).fields
    whole = re.escape(text(Message(identity, known), "en"))
    short = re.escape(text(Message(identity, {name: known[name] for name in _required(templates["en"], fields)}), "en"))
    return any(re.search(re.sub("\0.*?\0", ".*?", pattern), printed) for pattern in (whole, short))


def _required(template: str, fields: Mapping[str, Any]) -> set[str]:
    """Returns the names of the fields outside of a template's optional parts, and of those that are given."""
    return names_of(OPTIONAL.sub("", template)) | {*fields}


def said_by_ranks(printed: str, kind: str = r"\w+") -> Message:
    """Returns the message of the last error in what ranks have printed. kind: the name of its class."""
    found = [message_in(line) for line in re.findall(rf"samestep\.errors\.{kind}: (.+)$", printed, re.MULTILINE)]
    assert found and found[-1], printed
    return found[-1]
