"""The report as one HTML page: no other file, no network, no script; all names and texts are escaped."""

from __future__ import annotations

from markupsafe import Markup

from samestep.message import Message, message
from samestep.records.results import CompareResults
from samestep.report import columns, cost_table, monitor_text, numbers, verdicts
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
        cost_headings=cost_table.HEADINGS,
        costs=cost_table.cost_rows(results),
        crossings=cost_table.crossing_lines(results),
        figures=_figures(results),
        machine=_machine(results),
        divergences=[
            (label(row), row.first_divergence, verdicts.origins(row)) for row in results.engines if row.first_divergence
        ],
    )


def _figures(results: CompareResults) -> list[tuple[Markup, Message]]:
    """(SVG, caption) of each figure that has something to show. The SVG is markup: matplotlib has escaped its text."""
    if not results.measured:
        return []
    import_matplotlib()
    from samestep.report import plots

    compared = comparable_rows(results)
    launches = ", ".join(sorted({f"n={speed(row).n}" for row in compared}))
    caption = message("caption_of_speed", launches=launches or message("no_launch_measured"))
    figures = [(Markup(plots.speed(results)), caption)]
    if compared:
        steps, warmup = results.measured_steps, results.warmup_steps
        caption = message("caption_of_step_times", launches=launches, steps=steps, warmup=warmup)
        figures.append((Markup(plots.steps(results)), caption))
    if any(row.launches for row in results.engines):
        answer = results.same_as_one_process
        differs = message("one_process_trains_differently") if answer and not answer.same else None
        figures.append((Markup(plots.losses(results)), message("caption_of_losses", one_process=differs)))
    return figures


def _machine(results: CompareResults) -> list[tuple[Message, object]]:
    """(name, value) of where and how it ran; what a machine does not have is left out."""
    machine = results.machine
    facts: list[tuple[Message, object]] = [
        (message("heading_machine_name"), machine.host),
        (
            message("heading_processor"),
            message("processor_and_cores", processor=machine.processor, cores=machine.cores),
        ),
        (message("heading_gpu"), machine.gpu),
        (message("heading_device"), results.device),
        (
            message("heading_versions"),
            f"samestep {results.samestep}, Python {machine.python}, PyTorch {machine.torch}",
        ),
        (
            message("heading_data"),
            message("rows_and_global_batch", rows=results.rows, batch=results.global_batch),
        ),
        (message("heading_settings"), ", ".join(f"{name}={value}" for name, value in results.settings.items())),
        (message("heading_started"), results.started.replace("T", " ")),
    ]
    return [(name, value) for name, value in facts if value]
