"""run and evaluate: one launch trains the whole job, or evaluates weights; what it came to is left in the folder."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep import launch
from samestep.commands.study import Row, Study, check_devices, rows_of
from samestep.errors import Refused, TrainingFailed, UserError, nearest
from samestep.launch import Plan, command, ports, supervise
from samestep.launch.started_by import Started
from samestep.records.record import ENVIRONMENT, Record, finite, write_json
from samestep.report.figures import data_wait
from samestep.world.network import check_master


@dataclass(frozen=True)
class Wishes:
    """How to train. init: weights to start from. every: epochs from one evaluation to the next; 0: only the last.

    best: the metric, as 'accuracy' or 'error:min', whose best weights are kept; '' keeps the last. patience:
    evaluations without a better one after which the training ends.
    """

    init: Path | None = None
    every: int = 1
    best: str = ""
    patience: int | None = None

    def training(self, metrics: Mapping[str, str]) -> dict[str, Any]:
        """The plan's training. metrics: name -> 'min' or 'max', of a job with an evaluation. Raises UserError for a
        metric that there is not."""
        name, _, way = self.best.partition(":")
        if self.best and not name:
            raise UserError(f"--best {self.best}: no metric is named; give its name, as in --best accuracy")
        if name and not metrics:
            raise UserError(f"--best {self.best}: the job has no evaluation to find it by; give it Job(evaluation=…)")
        if name and name not in metrics:
            raise UserError(f"--best {self.best}: the job has no such metric; {nearest(name, list(metrics))}")
        if way not in ("", "min", "max"):
            raise UserError(f"--best {self.best}: '{way}' is neither min nor max")
        if (name or self.patience) and not self.every:
            raise UserError("--best and --patience need evaluations; give --evaluate-every 1 or more")
        if self.patience and not name:
            raise UserError("--patience needs to know what is better; name a metric with --best")
        best = [name, way or metrics[name]] if name else None
        asked = {"every": self.every, "best": best, "patience": self.patience}
        init = file_of(self.init, "--init")
        digest = _digest(Path(init)) if init else None
        return {"kind": "train", "as": "train", "init": init, "init_sha256": digest, **asked}


def scoring(weights: Path, predictions: Path | None, rows: int) -> dict[str, Any]:
    """The plan's part of an evaluation of the weights in a file. rows: that the job evaluates."""
    if not rows:
        raise UserError("the job has no evaluation; give it one: Job(evaluation=…)")
    if predictions is not None and predictions.exists():
        raise UserError(f"{predictions} exists, and would be replaced; give another name with --predictions")
    if predictions is not None and (predictions.suffix != ".npy" or not predictions.resolve().parent.is_dir()):
        raise UserError(f"--predictions {predictions}: give a file that ends in .npy, in a folder that there is")
    if predictions is not None:
        try:
            tempfile.TemporaryFile(dir=predictions.resolve().parent).close()
        except OSError as error:
            raise UserError(f"--predictions {predictions} cannot be written: {error.strerror}; name another") from None
    kept = str(predictions.resolve()) if predictions else None
    init = file_of(weights, "--weights")
    return {"kind": "score", "as": "score", "init": init, "init_sha256": _digest(weights), "predictions": kept}


def file_of(path: Path | None, flag: str) -> str | None:
    """The whole path of a file that a flag names; None for none. Raises UserError when there is no such file."""
    if path is not None and not path.is_file():
        raise UserError(f"{flag} {path}: there is no such file; give the weights.safetensors that a run left")
    return str(path.resolve()) if path else None


def prepare(
    study: Study,
    found: Mapping[str, Any],
    step: Mapping[str, Any],
    out: Path,
    folder: Path,
    inside: Started | None = None,
) -> tuple[Row, Plan]:
    """What to start for one training or evaluation, whose results go to `out` and whose launch has `folder`; starts
    nothing.

    inside: this command is one rank that somebody's launcher has started: it becomes that rank. Raises UserError when
    the engine cannot run here, or `out` holds weights already.
    """
    weights = out / "weights.safetensors"
    if weights.exists() and step["kind"] == "train":
        raise UserError(f"{weights} exists, and a new training would replace it; give another folder with --out")
    check_devices(study.nproc, found, study.engines)
    check_master(study.machines.master, study.machines.nnodes)
    ports.check(study.machines)
    (row,) = rows_of(study, found)
    if row.verdict.verdict == "unavailable":
        raise UserError(f"the engine {row.engine} cannot run here: {row.verdict.reason}")
    if row.verdict.verdict == "refused":
        raise Refused(str(row.verdict.reason))
    if study.machines.max_restarts and row.launcher != "torchrun":
        raise UserError(f"--max-restarts is torchrun's, and {row.launcher} starts this training; leave it out")
    if study.machines.hosts and row.launcher != "mpirun":
        raise UserError(f"--hosts is mpirun's, and {row.launcher} starts this training; add --launcher mpirun")
    able = launch.able(row.facts["process_kind"])
    if inside and inside.launcher not in able:
        raise UserError(
            f"{inside.launcher} has started {inside.size} processes, and {row.engine} starts as {' or '.join(able)}; "
            f"type it without {inside.launcher}"
        )
    asked: dict[str, Any] = {
        "job": study.job,
        "settings": dict(study.settings),
        "engine": row.engine,
        "weights": str(weights),
    }
    asked["engine_settings"] = row.facts["settings"]
    asked["trainings"] = [step]
    if inside:
        row.launcher = inside.launcher
        write_json(folder / "plan.json", {"out": str(folder), "started_at": time.time(), **asked})
        return row, command.inside(folder / "plan.json", inside, row.facts["devices"], study.machines)
    nproc = row.facts["processes"] // study.machines.nnodes
    return row, command.planned(asked, row.launcher, nproc, row.facts["devices"], folder, study.machines)


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
    """Trains, or evaluates. Returns what it came to; None where rank 0 is not.

    watch: given {phase, done, steps, loss} while it trains. alone: this command is one rank of somebody's launcher.
    """
    files = ("rendezvous", "progress.json", ENVIRONMENT)
    for left in [*folder.glob("*rank[0-9]*"), *folder.glob("log*.txt"), *(folder / name for name in files)]:
        left.unlink(missing_ok=True)  # of a try that did not end well
    apart = 1 if study.machines.reached else study.machines.nnodes  # machines that write into folders of their own
    record = supervise.run(
        plan,
        folder,
        1 if alone else row.facts["processes"] // apart,
        deadline_s=study.deadline_s,
        watch=watch,
        machines=study.machines,
        graceful=True,
    )
    if record.ranks[0]["rank"] != 0:
        return None
    results = {
        "schema": 1,
        "job": study.job,
        "settings": dict(study.settings),
        "launcher": row.launcher,
        "world_size": row.facts["layout"]["replicas"],
    }
    if "train" in record.ranks[0]["trainings"]:
        results |= _trained(found["job"], row, record, out)
    else:
        results |= _scored(found["job"], record)
    write_json(out / "results.json", finite(results))
    return results


def _trained(job: Mapping[str, Any], row: Row, record: Record, out: Path) -> dict[str, Any]:
    seen = record.training("train")[0]
    best = seen["curve"][seen["best_at"]] if seen["best_at"] >= 0 else {}
    (step,) = record.plan()["trainings"]
    return {
        "engine": row.engine,
        "engine_settings": row.facts["chosen"],
        "global_batch": job["global_batch"],
        "init": step["init"] and {"file": step["init"], "sha256": step["init_sha256"]},
        "steps": len(seen["step_s"]),
        "asked_steps": seen["asked_steps"],
        "stopped": seen["stopped"],
        "seconds": sum(seen["step_s"]),
        "skipped_steps": seen["skipped_steps"],
        "final_loss": seen["losses"][-1] if seen["losses"] else None,
        "curve": seen["curve"],
        "weights_of_step": best.get("step"),
        "evaluation": {name: value for name, value in best.items() if name != "step"} or None,
        "evaluation_rows": _covered(record, "train", job["evaluation_rows"]),
        "weights": str(out / "weights.safetensors"),
    } | _waiting(job, record)


def _scored(job: Mapping[str, Any], record: Record) -> dict[str, Any]:
    (step,) = record.plan()["trainings"]
    return {
        "weights": step["init"],
        "sha256": step["init_sha256"],
        "evaluation": record.training("score")[0]["evaluation"]["means"],
        "evaluation_rows": _covered(record, "score", job["evaluation_rows"]),
        "predictions": step["predictions"],
    }


def _covered(record: Record, training: str, rows: int) -> int:
    """How many rows were evaluated, each once. Raises TrainingFailed when that is not what the record says."""
    ranks = [rank["evaluation"] for rank in record.training(training)]
    seen = sorted(index for of_rank in ranks if of_rank for index in of_rank["indices"])
    here = len(ranks) == record.ranks[0]["world"]["size"]  # other machines' records may be in folders of their own
    if rows and here and seen != list(range(rows)):
        raise TrainingFailed(f"the evaluation saw {len(seen)} rows of {rows}, not each once: {record.folder}")
    return rows


def _digest(file: Path) -> str:
    state = hashlib.sha256()
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def _waiting(job: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """How the data came: the share of the time that was spent waiting, rows per second, and what would help."""
    cores = record.ranks[0]["machine"]["cores"] / record.ranks[0]["world"]["local_size"]
    loader = (job["global_batch"], job["workers"], job["prefetch"], cores, job["most_workers"])
    found = data_wait.measured(record.training("train"), *loader)
    return {
        "wait_share": found and found.share,
        "loader_ceiling": found and found.loader_ceiling,
        "demand": found and found.demand,
        "advice": found and found.advice(),
    }
