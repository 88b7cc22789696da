"""The lines below the terminal's table: what all engines have in common, what is wrong, and what is not available."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.records.results import CompareResults, EngineResult
from samestep.report.notes import ill_conditioned
from samestep.report.sentences import fewer_rows, label, one_process, problems, sentence, shares, title


def footer(results: CompareResults) -> list[str]:
    """Returns the lines, one or two sentences each. The HTML report has the rest: intervals, bounds, notes."""
    lines = [*one_process(results), _batch(results), _proof(results)]
    if results.measured:
        lines.append(_measured(results))
    lines += problems(results)
    lines += [
        f"{label(row)}: {summary}" for row in results.engines for summary in [ill_conditioned(row, results)] if summary
    ]
    lines += _in_the_report(results)
    lines += _unavailable(results)
    return [sentence(line) for line in lines]


def _batch(results: CompareResults) -> str:
    threads = results.threads_per_rank
    workers = f", {results.workers} loader workers" if results.workers else ""
    each = f"{threads} thread{'' if threads == 1 else 's'}{workers} a rank"
    return f"One step sees {shares(results.global_batch, results.world_size)}; {each}."


def _proof(results: CompareResults) -> str:
    proof = results.proof
    why = f" (float64 failed: {proof.float64_failed})" if proof.float64_failed else ""
    steps = f"{proof.steps} steps{fewer_rows(results)}"
    return f"max diff.: of a weight after {steps} in {proof.dtype}{why}, from the reference, one process"


def _measured(results: CompareResults) -> str:
    launches = f"{results.repeats} launch{'' if results.repeats == 1 else 'es'}"
    return (
        f"Speed: medians of {launches} of {results.measured_steps} steps in {results.dtype}, "
        "± half their 95 % interval; × one: of one process"
    )


def _in_the_report(results: CompareResults) -> Iterator[str]:
    names = [title(row) for row in results.engines if row.notes or row.numerics]
    if names:
        yield f"Notes on {', '.join(dict.fromkeys(names))}: in the report"


def _unavailable(results: CompareResults) -> Iterator[str]:
    """One line for all engines that cannot run here: what installs them, or why they cannot."""
    absent = [row for row in results.engines if row.verdict == "unavailable"]
    names: dict[str, list[str]] = {}
    for row in absent:
        names.setdefault(_remedy(row), []).append(_name(row, results))
    if names:
        yield "Not available here: " + "; ".join(
            f"{', '.join(dict.fromkeys(of))} ({remedy})" for remedy, of in names.items()
        )


def _remedy(row: EngineResult) -> str:
    return str(row.install or row.reason or "unavailable")


def _name(row: EngineResult, results: CompareResults) -> str:
    """With its launcher, where the engine runs under another one."""
    elsewhere = any(other.engine == row.engine and other.verdict != "unavailable" for other in results.engines)
    return label(row) if elsewhere else title(row)
