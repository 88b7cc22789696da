"""The collectives in the terminal: the table of a measurement, its sentences, and what --show prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import quantiles

from rich import box
from rich.table import Table

from samestep.records.collectives import (
    COLLECTIVES,
    REDUCTIONS,
    CollectiveCurve,
    CollectiveRank,
    CollectiveResults,
    Point,
    Unsupported,
)
from samestep.report.numbers import MISSING, amount, duration, percent, size

WIDTH = 100  # characters of a line
MOST_WRONG = 20  # wrong values that are printed


def table(results: CollectiveResults) -> Table:
    """A row for each collective, with its smallest and largest message; of one alone, a row for each size."""
    if len(results.curves) == 1:
        return _sizes_table(results.curves[0])
    grid = _table(["collective", *["size", "time", "±"] * 2, "alg MB/s", "bus MB/s", "latency"])
    for curve in results.curves:
        small, large = curve.points[0], curve.points[-1]
        if COLLECTIVES[curve.collective].kind == "wait":
            grid.add_row(curve.collective, MISSING, duration(small.median), spread(small), *[""] * 6)
            continue
        ends = [cell for point in (small, large) for cell in (size(point.size), duration(point.median), spread(point))]
        grid.add_row(curve.collective, *ends, *_bandwidths(large), duration(curve.pieces[0].latency))
    return grid


def _sizes_table(curve: CollectiveCurve) -> Table:
    grid = _table(["collective", "size", "calls", "time", "±", "alg MB/s", "bus MB/s", "by the fit"])
    for point in curve.points:
        cells = [str(len(point.seconds)), duration(point.median), spread(point), *_bandwidths(point)]
        grid.add_row(curve.collective, size(point.size), *cells, duration(curve.seconds(point.size)))
    return grid


def _table(headings: list[str]) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return grid


def _bandwidths(point: Point) -> list[str]:
    return [
        MISSING if bandwidth is None else amount(bandwidth / 1e6)
        for bandwidth in (point.algorithm_bandwidth, point.bus_bandwidth)
    ]


def spread(point: Point) -> str:
    """'3 %': half the distance between the quartiles, as a share of the median."""
    if len(point.seconds) < 2 or not point.median:
        return MISSING
    low, _, high = quantiles(point.seconds, n=4, method="inclusive")
    return percent((high - low) / 2 / point.median)


def sentences(results: CollectiveResults) -> Iterator[str]:
    """What was checked, what was wrong, what the backend lacks, and how to read the table."""
    where = f"{results.backend} on {results.world_size} ranks"
    if results.wrong:
        yield f"{len(results.wrong)} wrong values, {results.checked} calls right on every rank ({where}):"
        yield from (f"  {missing}" for missing in islice(wrong(results), MOST_WRONG))
        if len(results.wrong) > MOST_WRONG:
            yield f"  … and {len(results.wrong) - MOST_WRONG} more, in results.json"
    elif results.checked:
        yield f"{results.checked} calls had the right values on every rank ({where})."
    else:
        yield f"No call was possible ({where})."
    for missing in results.unsupported:
        yield unsupported(missing, results.backend)
    for name, why in results.unmeasured.items():
        yield f"{name} was not measured: {why}"


def wrong(results: CollectiveResults) -> Iterator[str]:
    """A sentence for each wrong value."""
    for wrong_value in results.wrong:
        kind = " ".join(filter(None, (wrong_value.dtype, wrong_value.reduction)))
        where = "" if wrong_value.group == "world" else f" in the {wrong_value.group}"
        name = f"{wrong_value.collective} ({kind})" if kind else wrong_value.collective
        yield f"{name}{where}: rank {wrong_value.rank} has {wrong_value.found}, not {wrong_value.expected}"


def unsupported(missing: Unsupported, backend: str) -> str:
    """What a backend lacks, in one sentence."""
    names = ", ".join(missing.collectives)
    dtypes = ", ".join(missing.dtypes)
    reductions = "" if len(missing.reductions) in (0, len(REDUCTIONS)) else f" by {', '.join(missing.reductions)}"
    return f"{backend} lacks {names}{f' of {dtypes}' if dtypes else ''}{reductions}; instead: {missing.instead}"


def show(ranks: Sequence[CollectiveRank], name: str) -> str:
    """What each rank held before and after one collective, and the code that does it."""
    code = ranks[0].code[name]
    lines = [f"{name}: {COLLECTIVES[name].does}", "", *(f"    {line}" for line in code.splitlines()), ""]
    return "\n".join([*lines, held_before_and_after(ranks, name)])


def held_before_and_after(ranks: Sequence[CollectiveRank], name: str) -> str:
    """The table of what each rank held, under a line with the arguments that are no tensors."""
    held = [next(values for values in rank.held if values.case.collective == name) for rank in ranks]
    case, code = held[0].case, ranks[0].code[name]
    uses = [f"root = {case.root}"] if "root" in code else []
    uses += [f"op = ReduceOp.{case.reduction.upper()}"] if case.reduction else []
    before = [values.before_text for values in held]
    after = [values.error or _after(name, values.rank, case.root, values.after_text) for values in held]
    width = max(map(len, [*before, "before"]))
    lines = [", ".join([*uses, "group: all ranks"]), "", f"rank  {'before':<{width}}  after"]
    lines += [f"{values.rank:>4}  {given:<{width}}  {received}" for values, given, received in zip(held, before, after)]
    return "\n".join(line.rstrip() for line in lines)


def _after(name: str, rank: int, root: int, text: str) -> str:
    return f"{text} (not defined)" if name == "reduce" and rank != root else text
