"""The page "resource usage" of `samestep monitor` and `samestep run`: no other file, no network, no script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from markupsafe import Markup

from samestep.records.monitor import CSV, MonitorSummary, Sample
from samestep.report import monitor_text, numbers
from samestep.report.figures.data_wait import StepParts
from samestep.report.html_pages import import_matplotlib, template


def monitor_page(
    summary: MonitorSummary, samples: Sequence[Sample], parts: Sequence[StepParts] = (), traces: Sequence[str] = ()
) -> str:
    """Returns the whole page. parts: of each rank's steps, in a training. traces: the files of --profile."""
    import_matplotlib()
    from samestep.report import monitor_plots

    return template("monitor.html.j2").render(
        summary=summary,
        command=shlex.join(summary.command),
        sentences=list(monitor_text.sentences(summary)),
        figure=Markup(monitor_plots.usage(samples)),
        numbers=numbers,
        csv=CSV,
        parts=parts,
        traces=traces,
    )
