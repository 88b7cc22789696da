"""The report of `samestep collectives` as one HTML page: no other file, no network, no script."""

from __future__ import annotations

from markupsafe import Markup

from samestep.message import Message, message
from samestep.records.collectives import CollectiveResults
from samestep.report import collective_text, numbers
from samestep.report.html_pages import import_matplotlib, template

FACTORS = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"


def collective_page(results: CollectiveResults) -> str:
    """Returns the whole page. Without a measurement it has no figures and no table of times."""
    sentences = list(collective_text.sentences(results))
    return template("collectives.html.j2").render(
        results=results,
        headline=sentences[0],
        sentences=sentences[1:],
        numbers=numbers,
        spread=collective_text.spread,
        figures=_figures(results),
        factors=FACTORS,
    )


def _figures(results: CollectiveResults) -> list[tuple[Markup, Message]]:
    """(SVG, caption) of each figure. The SVG is markup: matplotlib has escaped its text."""
    if not any(curve.points[-1].size for curve in results.curves):
        return []
    import_matplotlib()
    from samestep.report import collective_plots

    return [
        (
            Markup(collective_plots.times(results)),
            message("caption_of_collective_times"),
        ),
        (
            Markup(collective_plots.bandwidths(results)),
            message("caption_of_bus_bandwidths"),
        ),
    ]
