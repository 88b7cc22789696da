"""A fault, as a text patch of a script: what it does, and what must be found and named."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`new` for `old` in a script. question: whose answer is 'differs' first. cause: its id."""

    script: str
    name: str
    old: str
    new: str
    question: str
    cause: str
