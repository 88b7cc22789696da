"""The report's first sentence: which engines take the same step, which do not, and which is fastest here."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.records.results import CompareResults, EngineResult
from samestep.report.numbers import amount, factor
from samestep.report.sentences import comparable_rows, label, sentence, speed, title, verdict_text


def headline(results: CompareResults) -> str:
    """One sentence: what was proven, then what differs or failed, then what is fastest."""
    rows = results.engines
    clauses = _proofs(rows)
    clauses += [one_process_clause(results)] if results.same_as_one_process else []
    clauses += [f"{_names([row], rows)} {verdict_text(row)}" for row in rows if row.verdict == "differs"]
    failed = [row for row in rows if row.verdict == "failed"]
    if failed:
        clauses.append(f"{_names(failed, rows)} failed")
    compared = comparable_rows(results)
    if compared:
        clauses.append(_fastest(compared, rows))
    return sentence("; ".join(clauses or ["no engine could be proven here"]))


def one_process_clause(results: CompareResults) -> str:
    """Whether the job's training on several ranks is that of one process; empty where that was not compared."""
    compared, ranks = results.same_as_one_process, results.world_size
    if compared is None:
        return ""
    if compared.same:
        return f"this job trains on {ranks} ranks as in one process"
    what = "as expected" if compared.answer == "no, as expected" else "a mistake"
    return f"this job does not train on {ranks} ranks as in one process, {what}: {compared.reason}"


def _proofs(rows: Sequence[EngineResult]) -> list[str]:
    """A clause or two for each number of replicas. One process is named only where nothing else was proven."""
    proven = [row for row in rows if row.proven]
    proven = [row for row in proven if row.replicas != 1] or proven
    clauses = []
    for replicas in dict.fromkeys(row.replicas for row in proven):
        process = "one process" if replicas == 1 else f"one process playing {replicas} ranks"
        same = [row for row in proven if row.replicas == replicas and row.verdict == "same"]
        close = [row for row in proven if row.replicas == replicas and row.verdict == "approximate"]
        bitwise = [row for row in same if row.bitwise]
        if same:
            verb = "take" if _several(same) else "takes"
            how = "bit for bit" if bitwise == same else "up to rounding"
            if bitwise and bitwise != same:
                how = f"{_names(bitwise, rows)} bit for bit"
            clauses.append(f"{_names(same, rows)} {verb} the same step as {process}, {how}")
        if close:
            verb = "approximate" if _several(close) else "approximates"
            clauses.append(f"{_names(close, rows)} {verb} {'it' if same else f'the step of {process}'}")
    return clauses


def _fastest(compared: Sequence[EngineResult], rows: Sequence[EngineResult]) -> str:
    """The exact engine with the highest median, and those whose intervals overlap its own: they may be as fast.

    An approximate engine does less work: it is the fastest only where no exact engine was measured, and is otherwise
    named after the fastest.
    """
    exact = [row for row in compared if row.verdict == "same"] or compared
    best = max(exact, key=_median_speed)
    single = " (one process)" if best.replicas == 1 else ""
    text = f"fastest here: {_names([best], rows)}{single}, {amount(_median_speed(best))} samples/s"
    if best.ratio and not single:
        text += f" ({factor(best.ratio.median)} × one process)"
    tied = [row for row in exact if row is not best and speed(row).high >= speed(best).low]
    if tied:
        text += f", with no clear difference from {_names(tied, rows)}"
    faster = [row for row in compared if row not in exact and _median_speed(row) > _median_speed(best)]
    return text + "".join(
        f"; {_names([row], rows)}, approximate, reaches {amount(_median_speed(row))}" for row in faster
    )


def _median_speed(row: EngineResult) -> float:
    return speed(row).median


def _several(rows: Sequence[EngineResult]) -> bool:
    return len({row.engine for row in rows}) > 1


def _names(some: Sequence[EngineResult], rows: Sequence[EngineResult]) -> str:
    """'ddp and fsdp'; with the launcher where `some` has not all rows of an engine."""
    names = [title(row) if all(r in some for r in rows if r.engine == row.engine) else label(row) for row in some]
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
