"""run: one engine trains the whole job; its weights, final evaluation and record are left in the folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep import waiting
from samestep.errors import Refused, UserError
from samestep.launch import Plan
from samestep.network import check_master
from samestep.processes import ports, start
from samestep.record import Record, write_json
from samestep.study import Row, Study, check_devices, rows_of
from samestep.surroundings import Started


def prepare(
    study: Study, found: Mapping[str, Any], out: Path, folder: Path, inside: Started | None = None
) -> tuple[Row, Plan]:
    """What to start for a training whose results go to `out` and whose launch has `folder`; starts nothing.

    inside: this command is one rank that somebody's launcher has started: it becomes that rank. Raises UserError when
    the engine cannot run here, or `out` holds weights already.
    """
    weights = out / "weights.safetensors"
    if weights.exists():
        raise UserError(f"{weights} exists, and a new training would replace it; give another folder with --out")
    check_devices(study.nproc, found, study.engines)
    check_master(study.machines.master, study.machines.nnodes)
    ports.check(study.machines)
    (row,) = rows_of(study, found)
    if row.verdict.verdict == "unavailable":
        raise UserError(f"the engine {row.engine} cannot run here: {row.verdict.reason}")
    if row.verdict.verdict == "refused":
        raise Refused(str(row.verdict.reason))
    files = ("rendezvous", "progress.json", "slurm-step")
    for left in [*folder.glob("*rank[0-9]*"), *folder.glob("log*.txt"), *(folder / name for name in files)]:
        # of a try that did not end well
        left.unlink(missing_ok=True)
    asked: dict[str, Any] = {
        "job": study.job,
        "settings": dict(study.settings),
        "engine": row.engine,
        "weights": str(weights),
    }
    asked["engine_settings"] = row.facts["settings"]
    asked["trainings"] = [{"kind": "train", "as": "train"}]
    if inside:
        row.launcher = inside.launcher
        write_json(folder / "plan.json", {"out": str(folder), "started_at": time.time(), **asked})
        return row, start.inside(folder / "plan.json", inside, row.facts["devices"], study.machines)
    nproc = row.facts["processes"] // study.machines.nnodes
    return row, start.planned(asked, row.launcher, nproc, row.facts["devices"], folder, study.machines)


def train(
    study: Study,
    found: Mapping[str, Any],
    row: Row,
    plan: Plan,
    out: Path,
    folder: Path,
    watch: Callable[[Mapping[str, Any]], None],
    *,
    alone: bool = False,
) -> dict[str, Any] | None:
    """Trains. Returns what was trained, the evaluation's means and where the weights are; None where rank 0 is not.

    watch: given {phase, done, steps, loss} while it trains. alone: this command is one rank of somebody's launcher.
    """
    apart = 1 if study.machines.reached else study.machines.nnodes  # machines that write into folders of their own
    record = start.run(
        plan,
        folder,
        1 if alone else row.facts["processes"] // apart,
        deadline_s=study.deadline_s,
        watch=watch,
        machines=study.machines,
        graceful=True,
    )
    return _results(study, found, row, record, out) if record.ranks[0]["rank"] == 0 else None


def _results(study: Study, found: Mapping[str, Any], row: Row, record: Record, out: Path) -> dict[str, Any]:
    seen = record.training("train")[0]
    evaluation = seen["evaluation"]
    results = {
        "schema": 1,
        "job": study.job,
        "settings": dict(study.settings),
        "engine": row.engine,
        "engine_settings": row.facts["chosen"],
        "launcher": row.launcher,
        "world_size": row.facts["layout"]["replicas"],
        "global_batch": found["job"]["global_batch"],
        "steps": len(seen["step_s"]),
        "asked_steps": seen["asked_steps"],
        "seconds": sum(seen["step_s"]),
        "skipped_steps": seen["skipped_steps"],
        "final_loss": seen["losses"][-1] if seen["losses"] else None,
        "evaluation": evaluation and evaluation["means"],
        "evaluation_rows": evaluation and evaluation["rows"],
        "weights": str(out / "weights.safetensors"),
    }
    results |= _waiting(found["job"], record)
    write_json(out / "results.json", results)
    return results


def _waiting(job: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """How the data came: the share of the time that was spent waiting, rows per second, and what would help."""
    cores = record.ranks[0]["machine"]["cores"] / record.ranks[0]["world"]["local_size"]
    found = waiting.measured(record.training("train"), job["global_batch"], job["workers"], job["prefetch"], cores)
    return {
        "wait_share": found and found.share,
        "loader_ceiling": found and found.loader_ceiling,
        "demand": found and found.demand,
        "advice": found and found.advice(list(job["settings"])),
    }
