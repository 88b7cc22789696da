"""Formats numbers for the terminal, the figures and the page."""

from __future__ import annotations

from collections.abc import Callable

from samestep.records.results import StepTime, Summary

MISSING = "–"


def amount(value: float | None) -> str:
    """Three significant digits, or all before the point: 5210.4 is '5,210', 3.4189 is '3.42'."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def difference(value: float | None) -> str:
    """'2.2e-16'; only an exact zero is '0'."""
    if value is None:
        return MISSING
    return "0" if value == 0 else f"{value:.1e}"


def factor(value: float) -> str:
    """A ratio: '1.46'."""
    return f"{value:.2f}"


def size(value: int) -> str:
    """A number of bytes: 1024 is '1 KiB'."""
    for unit, of_one in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= of_one:
            return f"{value / of_one:.3g} {unit}"
    return f"{value} B"


def bit_rate(bits_per_second: float) -> str:
    """The bandwidth of a link: 2.5e8 is '250 Mbit/s'."""
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= scale:
            return (
                f"{bits_per_second / scale:.2g} {unit}"
                if bits_per_second < 100 * scale
                else f"{bits_per_second / scale:.0f} {unit}"
            )
    return f"{bits_per_second:.0f} bit/s"


def duration(seconds: float) -> str:
    """A number of seconds: 0.00123 is '1.23 ms'."""
    for unit, of_one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= of_one:
            return f"{amount(seconds / of_one)} {unit}"
    return f"{amount(seconds * 1e6)} µs"


def percent(value: float) -> str:
    """A share: 0.731 is '73 %'."""
    return f"{100 * value:.0f} %"


def median(summary: Summary | None, show: Callable[[float], str]) -> str:
    """The median alone, as `show` formats it."""
    return show(summary.median) if summary else MISSING


def interval(summary: Summary | None, show: Callable[[float], str]) -> str:
    """'5,100–5,300'; empty for an interval without width, such as that of a single launch."""
    if summary is None or summary.low == summary.high:
        return ""
    return f"{show(summary.low)}–{show(summary.high)}"


def spread(summary: Summary | None) -> str:
    """'3 %': half the interval's width, as a share of the median; without an interval, as for a single launch, '–'."""
    if summary is None or summary.low == summary.high or not summary.median:
        return MISSING
    return percent((summary.high - summary.low) / 2 / summary.median)


def interval_and_n(summary: Summary | None, show: Callable[[float], str]) -> str:
    """'5,100–5,300, n=5'"""
    if summary is None:
        return ""
    between = interval(summary, show)
    return f"{between}, n={summary.n}" if between else f"n={summary.n}"


def wait_and_step(step_ms: StepTime | None) -> str:
    """'0.1 / 4.2': the milliseconds that a step waited for data, and those that it took in all."""
    return f"{amount(step_ms.wait)} / {amount(step_ms.step)}" if step_ms else MISSING
