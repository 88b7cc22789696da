"""Collects the results of a comparison: the question, the job, the machine, the verdicts and the measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from samestep.commands.engine_rows import Row, result_of
from samestep.commands.inspected_setup import InspectedSetup
from samestep.commands.results_folder import package_digest
from samestep.commands.setup import Setup
from samestep.engine import BASELINE
from samestep.proof.plan import second_steps
from samestep.proof.trace import Expectation
from samestep.records.files import read
from samestep.records.monitor import SUMMARY, MonitorSummary
from samestep.records.record import Record
from samestep.records.redaction import redacted_values
from samestep.records.results import CompareResults, EngineResult, Proof
from samestep.report.figures.speed import Measured, measurement
from samestep.version import __version__


def results_of(inspected: InspectedSetup, rows: list[Row], reference: Record | None, started: str) -> CompareResults:
    """Collects the results: the question, the job, the machine, the verdicts and the measurements."""
    setup, job = inspected.setup, inspected.job
    references = [Expectation(reference, n) for n in range(len(reference.ranks[0].layouts))] if reference else []
    of_step = job.proof.rows or job.data.global_batch
    proof = Proof(job.proof.steps, "float64", rows=of_step, quick=setup.quick, rows_looked_at=job.proof.rows_looked_at)
    if any(row.second for row in rows):
        proof = replace(proof, second_steps=second_steps(job))
    if references:
        facts = references[0].facts
        proof = replace(proof, dtype=facts.dtype, float64_failed=facts.float64_failed)
    return CompareResults(
        samestep=__version__,
        package=package_digest(),
        job=setup.job,
        settings=redacted_values(setup.settings),
        world_size=inspected.size,
        global_batch=job.data.global_batch,
        rows=job.data.rows,
        device=inspected.inspection.devices[0],
        machine=inspected.inspection.machine,
        threads_per_rank=_threads(rows, setup),
        workers=job.data.workers,
        dtype=job.model.dtype,
        started=started,
        proof=proof,
        engines=list(_engine_results(inspected, rows)),
        tensors=_tensors(references),
        repeats=setup.rounds or None,
        warmup_steps=setup.warmup_steps if setup.rounds else None,
        measured_steps=setup.measured_steps if setup.rounds else None,
    )


def _threads(rows: list[Row], setup: Setup) -> int:
    """Returns the threads of each rank: the same under every engine."""
    counts = {rank.threads for row in rows for record in row.launches for rank in record.ranks}
    return max(counts, default=setup.machines.threads or 1)


def _tensors(references: list[Expectation]) -> int | None:
    """Counts the tensors of the model's state."""
    played = [expectation for expectation in references if "sgd" in expectation.facts.trainings]
    return len(played[0].noise_distances("sgd")) if played else None


def _engine_results(inspected: InspectedSetup, rows: list[Row]) -> Iterator[EngineResult]:
    setup = inspected.setup
    baseline = next((row.launches for row in rows if row.engine == BASELINE and row.launches), [])
    data, phases = inspected.job.data, max(1, len(inspected.job.optimizer.phases))
    sizes = (data.global_batch, data.rows, data.steps_per_epoch, phases)
    measured = Measured(setup.warmup_steps, setup.measured_steps, *sizes)
    for row in rows:
        result = result_of(row)
        if setup.rounds and result.proven and row.launches:
            figures = measurement(row.launches, baseline, row.facts.replicas, measured)
            used = row.launches[-1].folder / SUMMARY  # absent where the disk has taken no samples
            monitor = read(MonitorSummary, used) if used.exists() else None
            result = result.with_measurement(replace(figures, monitor=monitor))
        yield result
