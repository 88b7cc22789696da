"""Notes that are too long for a line: a summary, and what the HTML report folds away."""

from __future__ import annotations

from samestep.records.results import CompareResults, EngineResult

ILL_CONDITIONED = "ill-conditioned: "  # begins the proof's list of tensors, 'NAME (training), NAME (training)'


def ill_conditioned(row: EngineResult, results: CompareResults) -> str | None:
    """'7 of 18 tensors not compared at the end, …', from the proof's list of their names; None where there are none."""
    names = {each.partition(" (")[0] for note in row.notes for each in _listed(str(note))}
    if not names:
        return None
    of = f" of {results.tensors}" if results.tensors else ""
    return f"{len(names)}{of} tensors not compared at the end, where rounding alone is visible"


def folded(note: str, row: EngineResult, results: CompareResults) -> tuple[str, list[str]]:
    """(summary, what is behind it) of one note; a note that is short has nothing behind it."""
    names = _listed(note)
    summary = ill_conditioned(row, results)
    return (summary, names) if names and summary else (note, [])


def _listed(note: str) -> list[str]:
    return note.removeprefix(ILL_CONDITIONED).split(", ") if note.startswith(ILL_CONDITIONED) else []
