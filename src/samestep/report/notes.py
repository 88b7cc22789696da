"""Notes that are too long for a line: a summary, and what the HTML report folds away."""

from __future__ import annotations

from samestep.message import Message
from samestep.records.results import CompareResults, EngineResult

ILL_CONDITIONED = "tensors_ill_conditioned"  # the proof's note of the tensors that it could not compare


def ill_conditioned(row: EngineResult, results: CompareResults) -> str | None:
    """'7 of 18 tensors not compared at the end, …', from the proof's list of their names; None where there are none."""
    names = {name for note in row.notes for name in _names(note)}
    if not names:
        return None
    of = f" of {results.tensors}" if results.tensors else ""
    return f"{len(names)}{of} tensors not compared at the end, where rounding alone is visible"


def folded(note: Message, row: EngineResult, results: CompareResults) -> tuple[str, list[str]]:
    """(summary, what is behind it) of one note; a note that is short has nothing behind it."""
    names = _names(note)
    summary = ill_conditioned(row, results)
    return (summary, names) if names and summary else (str(note), [])


def _names(note: Message) -> list[str]:
    return [*note.fields["sgd"], *note.fields["user"]] if note.id == ILL_CONDITIONED else []
