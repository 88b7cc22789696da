"""Draws the times and the bus bandwidths of the collectives over message sizes as SVG."""

from __future__ import annotations

from collections.abc import Callable

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from samestep.message import Message, message
from samestep.records.collectives import COLLECTIVES, CollectiveCurve, CollectiveResults
from samestep.report.numbers import duration, size
from samestep.report.plots import PALETTE, STYLE, WIDTH, svg

COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000", PALETTE[0]]
PANELS = {
    "reduce": "collectives_that_reduce",
    "one": "collectives_of_one_rank",
    "all": "collectives_of_all_ranks",
    "pair": "collectives_of_two_ranks",
}
FIT_POINTS = 12  # of a piece's line

Draw = Callable[[Axes, CollectiveCurve, str], None]
Shown = Callable[[float], str]


def times(results: CollectiveResults) -> str:
    """The median time of each collective over the message's size, with the fit as a line."""

    def draw(axes: Axes, curve: CollectiveCurve, colour: str) -> None:
        sizes = [point.size for point in curve.points]
        axes.plot(
            sizes, [point.median for point in curve.points], "o", color=colour, markersize=3.5, label=curve.collective
        )
        for piece in curve.pieces:
            step = (piece.last_size / piece.first_size) ** (1 / FIT_POINTS)
            sizes = [piece.first_size * step**i for i in range(FIT_POINTS + 1)]
            axes.plot(
                sizes,
                [piece.latency + piece.per_byte * size for size in sizes],
                color=colour,
                linewidth=1,
            )

    return _panels(results, draw, "times", str(message("figure_of_collective_times")), duration)


def bandwidths(results: CollectiveResults) -> str:
    """The bus bandwidth of each collective over the message's size."""

    def draw(axes: Axes, curve: CollectiveCurve, colour: str) -> None:
        points = [(point.size, point.bus_bandwidth) for point in curve.points if point.bus_bandwidth]
        sizes, speeds = zip(*points)
        axes.plot(
            sizes,
            [speed / 1e6 for speed in speeds],
            "o-",
            color=colour,
            markersize=3.5,
            linewidth=1,
            label=curve.collective,
        )

    return _panels(results, draw, "bus", str(message("figure_of_bus_bandwidths")), lambda x: f"{x:,g} MB/s")


def _panels(results: CollectiveResults, draw: Draw, name: str, title: str, formatted: Shown) -> str:
    """A panel for each kind of collective that was measured, with common axes."""
    of_kinds = {
        kind: [curve for curve in results.curves if COLLECTIVES[curve.collective].kind == kind] for kind in PANELS
    }
    kinds = [kind for kind, curves in of_kinds.items() if curves]
    rows = -(-len(kinds) // 2)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.4 * rows), layout="constrained")
        panels = list(figure.subplots(rows, min(2, len(kinds)), sharex=True, sharey=True, squeeze=False).flat)
        for axes, kind in zip(panels, kinds):
            for curve, colour in zip(of_kinds[kind], COLOURS):
                draw(axes, curve, colour)
            _scales(axes, formatted)
            axes.set_title(str(Message(PANELS[kind])), loc="left", fontsize=10)
            axes.legend(frameon=False, fontsize=8)
        for axes in panels[len(kinds) :]:
            axes.set_visible(False)
        return svg(figure, name, title)


def _scales(axes: Axes, formatted: Shown) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=16))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(round(x))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: formatted(y)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid()
