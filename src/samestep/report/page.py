"""The report as one HTML page: no other file, no network, no script; what users named is escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from samestep.report import numbers, sentences
from samestep.report.headline import answer
from samestep.report.sentences import TRAININGS, Results, label, measured, racing

MARKS = {"same": "✓", "approximate": "≈", "differs": "✗", "failed": "✗", "refused": "–", "unavailable": "–"}


def page(results: Results) -> str:
    """The whole page. Without a measurement it has no figures and no columns of speed."""
    environment = Environment(
        loader=PackageLoader("samestep.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        results=results,
        answer=answer(results),
        numbers=numbers,
        say=sentences,
        trainings=TRAININGS,
        marks=MARKS,
        raced=racing(results),
        with_speed=measured(results),
        figures=_figures(results),
        machine=_machine(results),
        divergences=[(label(row), row["first_divergence"]) for row in results["engines"] if row["first_divergence"]],
    )


def _figures(results: Results) -> list[tuple[Markup, str]]:
    """(SVG, caption) of each figure that has something to show. The SVG is markup: matplotlib has escaped its text."""
    if not measured(results):
        return []
    from samestep.report import plots

    launches = ", ".join(sorted({f"n={row['samples_per_second']['n']}" for row in racing(results)}))
    timed = f"{results['measured_steps']} steps a launch, after {results['warmup_steps']} that are left out"
    figures = [
        (
            Markup(plots.speed(results)),
            f"Speed. Bar: the median over launches ({launches or 'none measured'}); whisker: its 95 % bootstrap "
            "interval. An engine that was not proven to take the same step has no bar: it runs another training.",
        )
    ]
    if racing(results):
        figures.append(
            (
                Markup(plots.steps(results)),
                f"Steadiness. A dot is one step, a lane of dots one launch ({launches} launches, {timed}); "
                "the line is the median that the table shows.",
            )
        )
    if any(row.get("launches") for row in results["engines"]):
        asked = results["same_as_one_process"]
        apart = (
            ""
            if asked is None or asked["same"]
            else " For this job one process alone trains something else: see below."
        )
        figures.append(
            (
                Markup(plots.losses(results)),
                "Losses, of every launch. Where trainings are the same, the thinner lines lie on the broader: "
                f"one striped line is what to look for.{apart}",
            )
        )
    return figures


def _machine(results: Results) -> list[tuple[str, str]]:
    """(name, value) of where and how it ran; what a machine does not have is left out."""
    machine = results["machine"]
    facts = {
        "Machine": machine["host"],
        "Processor": f"{machine['processor']}, {machine['cores']} cores",
        "GPU": machine["gpu"],
        "Device": results["device"],
        "Versions": f"samestep {results['samestep']}, Python {machine['python']}, PyTorch {machine['torch']}",
        "Data": f"{results['rows']:,} rows, global batch {results['global_batch']}",
        "Settings": ", ".join(f"{name}={value}" for name, value in results["settings"].items()),
        "Started": results["started"].replace("T", " "),
    }
    return [(name, str(value)) for name, value in facts.items() if value]
