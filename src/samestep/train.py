"""run: one engine trains the whole job; its weights, final evaluation and record are left in the folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.errors import Refused, UserError
from samestep.launch import start
from samestep.record import write_json
from samestep.study import Study, check_devices, rows_of


def train(
    study: Study, found: Mapping[str, Any], folder: Path, watch: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Trains in `folder`. Returns what was trained, the evaluation's means and where the weights are.

    watch: given {phase, done, steps, loss} while it trains. Raises UserError when the engine cannot run here, or the
    folder holds weights already.
    """
    weights = folder / "weights.safetensors"
    if weights.exists():
        raise UserError(f"{weights} exists, and a new training would replace it; give another folder with --out")
    check_devices(study.nproc, found, study.engines)
    start.check_port(study.port)
    (row,) = rows_of(study, found)
    if row.verdict.verdict == "unavailable":
        raise UserError(f"the engine {row.engine} cannot run here: {row.verdict.reason}")
    if row.verdict.verdict == "refused":
        raise Refused(str(row.verdict.reason))
    for left in [*folder.glob("*rank*"), folder / "rendezvous", folder / "log.txt"]:  # of a try that did not end well
        left.unlink(missing_ok=True)
    asked = {"job": study.job, "settings": dict(study.settings), "engine": row.engine}
    asked["engine_settings"] = row.facts["settings"]
    record = start.work(
        asked | {"trainings": [{"kind": "train", "as": "train"}]},
        row.launcher,
        row.facts["processes"],
        row.facts["devices"],
        folder,
        port=study.port,
        deadline_s=study.deadline_s,
        watch=watch,
    )
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
        "seconds": sum(seen["step_s"]),
        "skipped_steps": seen["skipped_steps"],
        "final_loss": seen["losses"][-1],
        "evaluation": evaluation and evaluation["means"],
        "evaluation_rows": evaluation and evaluation["rows"],
        "weights": str(weights),
    }
    write_json(folder / "results.json", results)
    return results
