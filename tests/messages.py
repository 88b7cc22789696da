"""What tests ask of a message: its id, those of the messages in it, and whether it explains a planted fault."""

from __future__ import annotations

from samestep.message import Message


def ids(message: Message | None) -> set[str]:
    """The ids of a message and of the messages in its fields."""
    if message is None:
        return set()
    return {message.id}.union(*(ids(value) for value in message.fields.values() if isinstance(value, Message)))


def explains(message: Message | None, cause: str) -> bool:
    """Whether a message has the ids of a planted fault's cause: separated by spaces, alternatives by '|'."""
    return any(set(wanted.split()) <= ids(message) for wanted in cause.split("|"))
