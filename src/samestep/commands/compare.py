"""compare: engines x rounds, interleaved and resumable. Proves each engine, measures those that are proven.

One launch both measures and proves: the measured training comes first, so that the proof adds nothing to its memory
or time. Later rounds only measure. A launch that left its records is not repeated when the same study is resumed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from samestep import __version__
from samestep.commands import other_machines
from samestep.commands.results_folder import package_digest
from samestep.commands.study import Row, Study, check_devices, rows_of
from samestep.errors import Refused, TrainingFailed, UserError
from samestep.launch import Machines, command, fork_client, ports, supervise
from samestep.proof.judge import Verdict, judge, one_process
from samestep.proof.plan import loop_layout, numerics_layout, plain_layout
from samestep.proof.plan import trainings as proof_trainings
from samestep.proof.trace import Expectation
from samestep.records.record import Record
from samestep.report.figures.speed import Measured, measurement, without_measurement

Tell = Callable[[str, int, int], None]  # (what runs, launches done, launches in all)


def conduct(study: Study, found: Mapping[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
    """Runs the study, its launches' records under `folder`. Returns its results, described in docs/results.md."""
    check_devices(study.nproc, found, study.engines)
    ports.check(study.machines)
    rows = rows_of(study, found, forks=study.rounds == 0)
    planned = [row for row in rows if row.open]
    total = 1 + len(planned) * max(1, study.rounds)
    began = time.localtime()
    reference = _reference(study, found, planned, folder, lambda phase: tell(phase, 0, total)) if planned else None
    if study.rounds:
        fork_client.close()  # nothing else is to run beside what is measured
    done = 1
    for number in range(max(1, study.rounds)):
        for row in _rotated(planned, number):
            if row.open and reference:
                phases = _teller(tell, row, done, total)
                _launch(study, row, number, folder, reference, phases)
            done += 1
            tell(row.name, done, total)
    results = {"started": time.strftime("%Y-%m-%dT%H:%M:%S", began)} | _question(study, found)
    return results | _answers(study, found, rows, reference)


def _rotated(rows: list[Row], by: int) -> Iterator[Row]:
    """Each round starts with another engine, so that none always runs first, or after the same one."""
    shift = by % len(rows) if rows else 0
    yield from rows[shift:] + rows[:shift]


def _teller(tell: Tell, row: Row, done: int, total: int) -> Callable[[str], None]:
    return lambda phase: tell(f"{row.name}: {phase}", done, total)


def _reference(
    study: Study, found: Mapping[str, Any], rows: list[Row], folder: Path, phases: Callable[[str], None]
) -> Record:
    """Plays every layout that a row needs, and plain one-process training, in one process."""
    layouts = [] if found["job"]["refused"]["1"] else [plain_layout()]
    for row in rows:
        for layout in (loop_layout(row.facts), numerics_layout(row.facts)):
            if layout is not None and layout not in layouts:
                layouts.append(layout)
        row.loop_number = layouts.index(loop_layout(row.facts))
        inexact = numerics_layout(row.facts)
        row.numerics_number = layouts.index(inexact) if inexact else None
    plan = {"layouts": layouts, "steps": study.steps, "replicas": study.size}
    return _start(study, folder, "process", 1, found["devices"], folder / "reference", plan, phases, "--reference")


def _launch(
    study: Study, row: Row, number: int, folder: Path, reference: Record, phases: Callable[[str], None]
) -> None:
    trainings: list[dict[str, Any]] = []
    if study.rounds:
        steps = study.warmup_steps + study.measured_steps
        trainings.append({"kind": "measure", "as": "measure", "steps": steps})
    loop = Expectation(reference, row.loop_number)
    numerics = None if row.numerics_number is None else Expectation(reference, row.numerics_number)
    if number == 0:
        trainings += proof_trainings(row.facts, loop, study.steps, study.size)
    plan = {"engine": row.engine, "engine_settings": row.facts["settings"], "trainings": trainings}
    devices = row.facts["devices"]
    where = folder / "launches" / f"{row.name}-{number}"
    try:
        record = _start(study, folder, row.launcher, row.facts["processes"], devices, where, plan, phases)
    except Refused as error:
        row.verdict = Verdict("refused", reason=str(error))
    except (UserError, TrainingFailed) as error:
        row.verdict = Verdict("failed", reason=str(error))
    else:
        row.launches.append(record)
        if number == 0:
            row.verdict = judge(loop, record, numerics)


def _start(
    study: Study,
    root: Path,
    launcher: str,
    size: int,
    devices: list[str],
    folder: Path,
    plan: Mapping[str, Any],
    phases: Callable[[str], None],
    *flags: str,
) -> Record:
    if Record(folder).complete(size):
        return Record(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    asked = {"job": study.job, "settings": dict(study.settings), **plan}
    machines = Machines() if launcher == "process" else study.machines  # one process is one machine's
    nproc = size // machines.nnodes
    planned = command.planned(asked, launcher, nproc, devices, folder, machines, flags)
    if flags and devices[0] == "cpu":
        planned = replace(planned, fork="reference")
    if machines.nnodes > 1 and not machines.reached:
        join = {"launcher": launcher, "nproc": nproc, "size": size, "devices": devices}
        other_machines.tell(
            root, launch=join | {"folder": str(folder.relative_to(root)), "id": f"{folder.name} {time.time()}"}
        )

    def watch(told: Mapping[str, Any]) -> None:
        phases(told["phase"])
        if study.machines.nnodes > 1:
            other_machines.tell(root)

    return supervise.run(planned, folder, size, deadline_s=study.deadline_s, watch=watch, machines=machines)


def _question(study: Study, found: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked, of what, where."""
    job = found["job"]
    question = {
        "schema": 1,
        "samestep": __version__,
        "package": package_digest(),
        "job": study.job,
        "settings": dict(study.settings),
        "world_size": study.size,
        "global_batch": job["global_batch"],
        "rows": job["rows"],
        "device": found["devices"][0],
        "machine": found["machine"],
        "threads_per_rank": 1,
        "workers": job["workers"],
        "dtype": job["dtype"],
    }
    if study.rounds:
        figures = {"warmup_steps": study.warmup_steps, "measured_steps": study.measured_steps}
        question |= {"repeats": study.rounds} | figures
    return question


def _answers(study: Study, found: Mapping[str, Any], rows: list[Row], reference: Record | None) -> dict[str, Any]:
    """What the proof found and what the launches measured, a row each."""
    played = [Expectation(reference, n) for n in range(len(reference.ranks[0]["layouts"]))] if reference else []
    alone = next((e for e in played if e.facts["layout"]["replicas"] == 1 and "gradient.0" in e.facts), None)
    many = next((e for e in played if e.facts["layout"]["replicas"] > 1 and "gradient.0" in e.facts), None)
    proof = played[0].facts if played else {"dtype": "float64", "float64_failed": None}
    baseline = next((row.launches for row in rows if row.engine == "single" and row.launches), [])
    sizes = {key: found["job"][key] for key in ("global_batch", "rows", "steps_per_epoch")}
    measured = Measured(study.warmup_steps, study.measured_steps, **sizes)
    shown = []
    for row in rows:
        judged = {"engine": row.engine, "launcher": row.launcher, **asdict(row.verdict)}
        judged["settings"] = row.facts.get("chosen", {})
        judged["replicas"] = row.facts["layout"]["replicas"] if row.facts.get("layout") else None
        if study.rounds:
            proven = row.verdict.verdict in ("same", "approximate") and row.launches
            judged |= (
                measurement(row.launches, baseline, judged["replicas"], measured) if proven else without_measurement()
            )
        shown.append(judged)
    return {
        "proof": {"steps": study.steps, "dtype": proof["dtype"], "float64_failed": proof["float64_failed"]},
        "same_as_one_process": one_process(many, alone, found["job"]) if many and alone else None,
        "engines": shown,
    }
