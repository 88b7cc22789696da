"""Draws the report's three figures as SVG: speeds, step times and losses.

Text stays text, so that it can be searched and takes the page's font; the same results give the same bytes.
"""

from __future__ import annotations

import io
import warnings
from textwrap import shorten
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from samestep.errors import printable
from samestep.message import message
from samestep.records.results import CompareResults, EngineResult
from samestep.report import verdicts
from samestep.report.numbers import amount, interval_and_n
from samestep.report.verdicts import comparable_rows, label, verdict_text

STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a job may be called 'a$b$c'
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#4b515a",
    "xtick.color": "#4b515a",
    "ytick.color": "#1d2129",
    "text.color": "#1d2129",
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
}
# Okabe and Ito's palette, which colour-blind eyes distinguish, too: https://jfly.uni-koeln.de/color/
# Its vermilion is kept for what differs, its yellow is too faint for a line, and the first, broadest line is grey.
PALETTE = ["#aab1ba", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000"]
VERMILION, BLUE, PALE, INK, GREY = "#D55E00", "#0072B2", "#9CC7E2", "#1d2129", "#6a707a"
WIDTH = 10.0  # inches
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"


def speed(results: CompareResults) -> str:
    """A bar for each proven engine, with its interval. In place of a bar, the others have the reason."""
    rows, compared = results.engines, comparable_rows(results)
    with matplotlib.rc_context(STYLE):
        figure, axes = _lanes(rows)
        right = max((verdicts.speed(row).high for row in compared), default=1.0)
        for y, row in enumerate(rows):
            if row not in compared:
                why = (
                    message("verdict_and_why", verdict=verdicts.verdict(row), why=row.reason)
                    if row.reason
                    else verdict_text(row)
                )
                words = shorten(printable(why), 110, placeholder=" …")
                axes.text(right * 0.01, y, words, va="center", color=GREY, style="italic")
                continue
            _bar(axes, y, row)
        axes.set_xlim(0, right * 1.6)  # room for the words behind the longest bar
        axes.set_xlabel(str(message("axis_of_speed")))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.grid(axis="x")
        return svg(figure, "speed", str(message("figure_of_speed")))


def _bar(axes: Axes, y: int, row: EngineResult) -> None:
    measured, exact = verdicts.speed(row), row.verdict == "same"
    median, low, high = measured.median, measured.low, measured.high
    (bar,) = axes.barh(y, median, height=0.56, color=BLUE if exact else PALE, hatch=None if exact else "//")
    bar.set_edgecolor("white")
    bar.set_gid(f"bar-{y}")
    if low < high:
        axes.plot([low, high], [y, y], color=INK, linewidth=1.3, marker="|", markersize=9, markeredgewidth=1.3)
    words = f"{amount(median)} ({interval_and_n(measured, amount)})"
    words = words if exact else str(message("speed_and_verdict", speed=words, verdict=verdicts.verdict(row)))
    axes.annotate(words, (high, y), xytext=(8, 0), textcoords="offset points", va="center")


def steps(results: CompareResults) -> str:
    """Every measured step of every launch as a dot: a lane for each launch, so that a slow launch stands out."""
    rows = comparable_rows(results)
    with matplotlib.rc_context(STYLE):
        figure, axes = _lanes(rows)
        for y, row in enumerate(rows):
            times = [launch.step_ms for launch in row.launches]
            for lane, of_launch in enumerate(times):
                middle = y + 0.62 * ((lane + 0.5) / len(times) - 0.5)
                # Multiples of the golden ratio fill the lane evenly, the same way every time.
                scattered = [middle + 0.4 / len(times) * (i * 0.618034 % 1 - 0.5) for i in range(len(of_launch))]
                axes.plot(of_launch, scattered, "o", color=BLUE, alpha=0.35, markersize=2.8, markeredgewidth=0)
            if row.step_ms:
                median = row.step_ms.step
                axes.plot([median] * 2, [y - 0.38, y + 0.38], color=INK, linewidth=2)
                axes.text(
                    1.01,
                    y,
                    str(message("median_of_step_times", ms=amount(median))),
                    transform=axes.get_yaxis_transform(),
                    va="center",
                )
        _logarithmic(axes)
        axes.set_xlabel(str(message("axis_of_step_times")))
        axes.grid(axis="x")
        return svg(figure, "steps", str(message("figure_of_step_times")))


def _logarithmic(axes: Axes) -> None:
    """A logarithmic x axis, because one slow step may take ten times the others, with round numbers on it."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high > 8 * low else MaxNLocator(8))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def losses(results: CompareResults) -> str:
    """Every engine's losses, each drawn thinner than the one before: equal losses show as stripes."""
    rows = [row for row in results.engines if row.launches]
    rows.sort(key=lambda row: row.verdict == "differs")  # last, and so on top
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for i, row in enumerate(rows):
            for launch in row.launches:
                axes.plot(
                    launch.losses,
                    color=VERMILION if row.verdict == "differs" else PALETTE[i % len(PALETTE)],
                    linewidth=6.5 - 4.9 * i / max(1, len(rows) - 1),
                    linestyle="-" if i % 2 == 0 else (0, (3, 2)),
                    label=printable(label(row)) if launch is row.launches[0] else None,
                )
        axes.set_xlabel(str(message("axis_of_training_steps", warmup=results.warmup_steps)))
        axes.set_ylabel(str(message("axis_of_loss")))
        axes.grid()
        axes.legend(frameon=False, handlelength=4)
        return svg(figure, "losses", str(message("figure_of_losses")))


def _lanes(rows: list[EngineResult]) -> tuple[Figure, Axes]:
    """An empty figure with a named lane for each row, the first on top."""
    figure = Figure(figsize=(WIDTH, 0.8 + 0.52 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yticks(range(len(rows)), [printable(label(row)) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure, axes


def svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an <svg> element of a page: scalable, with a title, and with ids that no other figure has."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser's font draws it
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(buffer.getvalue())
    root.attrib |= {"role": "img", "aria-label": title}
    for size in ("width", "height"):
        del root.attrib[size]  # the page gives the width; the viewBox keeps the shape
    for element in root.iter():
        for key, old in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{old}")
            elif old.startswith("#") and key.endswith("href"):
                element.set(key, f"#{name}-{old[1:]}")
            else:
                element.set(key, old.replace("url(#", f"url(#{name}-"))
    return ElementTree.tostring(root, encoding="unicode")
