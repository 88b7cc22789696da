"""The report as one HTML page: no other file, no network, no script; all names and texts are escaped."""

from __future__ import annotations

from markupsafe import Markup

from samestep.message import Message
from samestep.records.results import CompareResults
from samestep.report import columns, monitor_text, numbers, verdicts
from samestep.report.html_pages import import_matplotlib, template
from samestep.report.verdicts import TRAININGS, comparable_rows, folded, headline, label, speed

MARKS = {"same": "✓", "approximate": "≈", "differs": "✗", "failed": "✗", "refused": "–", "unavailable": "–"}


def page(results: CompareResults) -> str:
    """The whole page. Without a measurement it has no figures and no columns of speed."""
    return template("page.html.j2").render(
        results=results,
        headline=headline(results),
        numbers=numbers,
        columns=columns.ON_PAGE,
        verdicts=verdicts,
        monitor_text=monitor_text,
        folded=folded,
        trainings={name: Message(identity) for name, identity in TRAININGS.items()},
        marks=MARKS,
        compared=comparable_rows(results),
        parts=[(label(row), row.step_ms) for row in comparable_rows(results) if row.step_ms and row.step_ms.compute],
        used=[(label(row), row.monitor) for row in comparable_rows(results) if row.monitor],
        figures=_figures(results),
        machine=_machine(results),
        divergences=[(label(row), row.first_divergence) for row in results.engines if row.first_divergence],
    )


def _figures(results: CompareResults) -> list[tuple[Markup, str]]:
    """(SVG, caption) of each figure that has something to show. The SVG is markup: matplotlib has escaped its text."""
    if not results.measured:
        return []
    import_matplotlib()
    from samestep.report import plots

    compared = comparable_rows(results)
    launches = ", ".join(sorted({f"n={speed(row).n}" for row in compared}))
    timed = f"{results.measured_steps} steps a launch, after {results.warmup_steps} that are left out"
    figures = [
        (
            Markup(plots.speed(results)),
            f"Speed. Bar: the median over launches ({launches or 'none measured'}); whisker: its 95 % bootstrap "
            "interval. An engine that was not proven to take the same step has no bar: it runs another training.",
        )
    ]
    if compared:
        figures.append(
            (
                Markup(plots.steps(results)),
                f"Step times. A dot is one step, a lane of dots one launch ({launches} launches, {timed}); "
                "the line is the median that the table shows.",
            )
        )
    if any(row.launches for row in results.engines):
        answer = results.same_as_one_process
        differently = " One process alone trains this job differently: see below." if answer and not answer.same else ""
        figures.append(
            (
                Markup(plots.losses(results)),
                "Losses of every launch. Thinner lines are drawn over broader ones: where trainings are the same, "
                f"they show as one striped line.{differently}",
            )
        )
    return figures


def _machine(results: CompareResults) -> list[tuple[str, str]]:
    """(name, value) of where and how it ran; what a machine does not have is left out."""
    machine = results.machine
    facts = {
        "Machine": machine.host,
        "Processor": f"{machine.processor}, {machine.cores} cores",
        "GPU": machine.gpu,
        "Device": results.device,
        "Versions": f"samestep {results.samestep}, Python {machine.python}, PyTorch {machine.torch}",
        "Data": f"{results.rows:,} rows, global batch {results.global_batch}",
        "Settings": ", ".join(f"{name}={value}" for name, value in results.settings.items()),
        "Started": results.started.replace("T", " "),
    }
    return [(name, value) for name, value in facts.items() if value]
