"""The collectives in the terminal: the table of a measurement, its sentences, and what --show prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import quantiles

from rich import box
from rich.table import Table

from samestep.message import Message, message
from samestep.records.collectives import (
    COLLECTIVES,
    REDUCTIONS,
    CollectiveCurve,
    CollectiveRank,
    CollectiveResults,
    Point,
    Unsupported,
    WrongValue,
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
    where = {"backend": results.backend, "ranks": results.world_size}
    if results.wrong:
        wrong, checked = len(results.wrong), results.checked
        yield str(message("collectives_with_wrong_values", wrong=wrong, checked=checked, **where))
        yield from (f"  {wrong_value(value)}" for value in results.wrong[:MOST_WRONG])
        if wrong > MOST_WRONG:
            yield f"  {message('more_wrong_values', more=wrong - MOST_WRONG)}"
    elif results.checked:
        yield str(message("collectives_right", checked=results.checked, **where))
    else:
        yield str(message("no_collective_possible", **where))
    for missing in results.unsupported:
        yield str(unsupported(missing, results.backend))
    for name, why in results.unmeasured.items():
        yield str(message("collective_not_measured", collective=name, why=why))


def wrong_value(wrong: WrongValue) -> Message:
    """Returns what is wrong with a value that a rank has received."""
    return message(
        "collective_gave_a_wrong_value",
        collective=wrong.collective,
        kind=" ".join(filter(None, (wrong.dtype, wrong.reduction))),
        group=None if wrong.group == "world" else wrong.group,
        rank=wrong.rank,
        found=wrong.found,
        expected=wrong.expected,
    )


def unsupported(missing: Unsupported, backend: str) -> Message:
    """Returns what a backend lacks."""
    some = len(missing.reductions) not in (0, len(REDUCTIONS))
    return message(
        "backend_lacks",
        backend=backend,
        collectives=missing.collectives,
        dtypes=missing.dtypes,
        reductions=missing.reductions if some else None,
        instead=missing.instead,
    )


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
