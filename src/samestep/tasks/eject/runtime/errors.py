"""The errors that a job's checks and an engine's loop raise, for a script that has no report to make sentences."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in the job's input."""


class Refused(UserError):
    """A job that needs something that an engine cannot do."""


def message(id: str, /, **fields: object) -> str:
    """Returns what is said, as the name of its sentence in samestep and the values that the sentence shows."""
    return " ".join([id, *(f"{name}={value}" for name, value in fields.items())])
