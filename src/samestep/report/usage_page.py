"""The page "resource usage" of `samestep monitor` and `samestep run`: no other file, no network, no script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from markupsafe import Markup

from samestep.records.usage import CSV, Sample, UsageSummary
from samestep.report import numbers, usage_text
from samestep.report.figures.step_parts import StepParts
from samestep.report.matplotlib_settings import import_matplotlib
from samestep.report.templates import template


def usage_page(
    summary: UsageSummary, samples: Sequence[Sample], parts: Sequence[StepParts] = (), traces: Sequence[str] = ()
) -> str:
    """Returns the whole page. parts: of each rank's steps, in a training. traces: the files of --profile."""
    import_matplotlib()
    from samestep.report import usage_plots

    return template("usage.html.j2").render(
        summary=summary,
        command=shlex.join(summary.command),
        sentences=list(usage_text.sentences(summary)),
        figure=Markup(usage_plots.usage(samples)),
        numbers=numbers,
        csv=CSV,
        parts=parts,
        traces=traces,
    )
