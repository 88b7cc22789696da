"""The report's first sentence: which engines take the same step, which do not, and which is fastest here."""

from __future__ import annotations

from samestep.report.numbers import amount, factor
from samestep.report.sentences import PROVEN, Results, Row, label, racing, sentence, title, verdict_text


def answer(results: Results) -> str:
    """One sentence, its clauses from what was proven over what went wrong to what was measured."""
    rows = results["engines"]
    clauses = _proofs(rows)
    clauses += [f"{_names([row], rows)} {verdict_text(row)}" for row in rows if row["verdict"] == "differs"]
    failed = [row for row in rows if row["verdict"] == "failed"]
    if failed:
        clauses.append(f"{_names(failed, rows)} failed")
    if racing(results):
        clauses.append(_fastest(racing(results), rows))
    return sentence("; ".join(clauses or ["no engine could be proven here"]))


def _proofs(rows: list[Row]) -> list[str]:
    """What was proven, a clause or two for each number of replicas. One process alone is no news beside others."""
    proven = [row for row in rows if row["verdict"] in PROVEN]
    proven = [row for row in proven if row["replicas"] > 1] or proven
    clauses = []
    for replicas in dict.fromkeys(row["replicas"] for row in proven):
        process = "one process" if replicas == 1 else f"one process playing {replicas} ranks"
        same = [row for row in proven if row["replicas"] == replicas and row["verdict"] == "same"]
        close = [row for row in proven if row["replicas"] == replicas and row["verdict"] == "approximate"]
        bitwise = [row for row in same if row["bitwise"]]
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


def _fastest(raced: list[Row], rows: list[Row]) -> str:
    """The highest median of the exact engines, with those whose intervals reach into its own: nothing tells them apart.

    An approximate engine does less, so it is named beside them, and wins only where it is alone.
    """
    exact = [row for row in raced if row["verdict"] == "same"] or raced
    best = max(exact, key=_speed)
    alone = " (one process)" if best["replicas"] == 1 else ""
    said = f"fastest here: {_names([best], rows)}{alone}, {amount(_speed(best))} samples/s"
    if best["ratio"] and not alone:
        said += f" ({factor(best['ratio']['median'])} × one process)"
    low = best["samples_per_second"]["low"]
    tied = [row for row in exact if row is not best and row["samples_per_second"]["high"] >= low]
    if tied:
        said += f", not told apart from {_names(tied, rows)}"
    faster = [row for row in raced if row not in exact and _speed(row) > _speed(best)]
    return said + "".join(f"; {_names([row], rows)}, approximate, reaches {amount(_speed(row))}" for row in faster)


def _speed(row: Row) -> float:
    return float(row["samples_per_second"]["median"])


def _several(rows: list[Row]) -> bool:
    return len({row["engine"] for row in rows}) > 1


def _names(some: list[Row], rows: list[Row]) -> str:
    """'ddp and fsdp'; with the launcher where only some of an engine's rows are meant."""
    names = [title(row) if all(r in some for r in rows if r["engine"] == row["engine"]) else label(row) for row in some]
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
