"""Trace: what torch's flight recorder writes of the collectives that a rank has entered, as JSON.

torch writes more of each, and may call it otherwise in a later version: see entries_of.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pydantic import TypeAdapter

DEFAULT_GROUP = "0"


@dataclass(frozen=True)
class Entry:
    """A collective. process_group: its name and description. collective_seq_id: its number in that group, from 1.
    record_id: among all. profiling_name: as 'gloo:all_reduce'. retired: whether the rank waits in it no more."""

    process_group: tuple[str, str]
    collective_seq_id: int
    profiling_name: str
    input_sizes: tuple[tuple[int, ...], ...]
    time_created_ns: int
    retired: bool
    is_p2p: bool
    record_id: int = -1
    input_dtypes: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        return self.process_group[0]

    @property
    def is_of_all_ranks(self) -> bool:
        """Whether it is of the process group that holds all ranks."""
        return self.group == DEFAULT_GROUP

    @property
    def operation(self) -> str:
        """Its name without the backend's."""
        return self.profiling_name.partition(":")[2] or self.profiling_name


@dataclass(frozen=True)
class Trace:
    entries: tuple[Entry, ...] = ()


_trace = TypeAdapter(Trace)


def entries_of(text: bytes | str) -> tuple[Entry, ...]:
    """Reads a recorder's trace. Raises ValueError where the text is none."""
    return _trace.validate_python(json.loads(text)).entries
