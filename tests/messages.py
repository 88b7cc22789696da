"""What tests ask of a message: its id, those of the messages in it, and whether it explains a planted fault."""

from __future__ import annotations

from samestep.message import Message


def ids(message: Message | None) -> set[str]:
    """The ids of a message and of the messages in its fields, in lists too."""
    if message is None:
        return set()
    fields = [value if isinstance(value, list) else [value] for value in message.fields.values()]
    inner = [value for values in fields for value in values if isinstance(value, Message)]
    return {message.id}.union(*map(ids, inner))


def explains(message: Message | None, cause: str) -> bool:
    """Whether a message has the ids of a planted fault's cause: separated by spaces, alternatives by '|'."""
    return any(set(wanted.split()) <= ids(message) for wanted in cause.split("|"))
