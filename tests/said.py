"""What is said in tests: messages by their ids and fields, whatever their sentences are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from samestep.errors import SamestepError, UserError, message_in
from samestep.message import Message, plain_field


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


def said_by_ranks(printed: str, kind: str = r"\w+") -> Message:
    """Returns the message of the last error in what ranks have printed. kind: the name of its class."""
    found = [message_in(line) for line in re.findall(rf"samestep\.errors\.{kind}: (.+)$", printed, re.MULTILINE)]
    assert found and found[-1], printed
    return found[-1]
