"""The Python API: samestep.verify, compare, run and evaluate, for notebooks and scripts. See docs/python.md.

Each function does what the command of the same name does, and returns typed results; its processes have ended when it
returns. It raises samestep.UserError for a mistake, and samestep.TrainingFailed for a training that fails.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samestep.commands.compare import run_study, save
from samestep.commands.progress import Launches
from samestep.commands.setup import MachineOptions, Setup
from samestep.commands.train import ScoreOptions, TrainOptions
from samestep.commands.train import evaluate as evaluate_weights
from samestep.commands.train import run as train
from samestep.errors import UserError
from samestep.records.results import ScoreResults, StudyResults, TrainResults

Target = str | Path | Callable[..., Any]
Values = Mapping[str, Any]


def verify(
    job: Target = "digits",
    engines: str | Sequence[str] = (),
    *,
    nproc: int | None = None,
    settings: Values | None = None,
    engine_settings: Values | None = None,
    launchers: str | Sequence[str] = (),
    device: str = "auto",
    out: str | Path | None = None,
    steps: int = 8,
    deadline_s: float | None = None,
    machines: MachineOptions = MachineOptions(),  # noqa: B008 - frozen
) -> StudyResults:
    """Proves that each engine computes the same training as the reference, one process that computes every rank's part.

    job: a function that returns a Job, the path of a file (its function `job`, or file.py:function), or the name of a
    built-in job. engines: empty: all of them. settings: of the job's function; engine_settings: of the engines, as
    in {"fsdp.units": "root"}. `results.engines` holds one Verdict per engine.
    """
    with _target(job) as target:
        setup = Setup(
            job=target,
            settings=_texts(settings),
            engines=_names(engines),
            engine_settings=_texts(engine_settings),
            launchers=_names(launchers),
            nproc=nproc,
            device=device,
            out=Path(out) if out else None,
            steps=steps,
            deadline_s=deadline_s,
            machines=machines,
        )
        return _study("verify", setup)


def compare(
    job: Target = "digits",
    engines: str | Sequence[str] = (),
    *,
    nproc: int | None = None,
    settings: Values | None = None,
    engine_settings: Values | None = None,
    launchers: str | Sequence[str] = (),
    device: str = "auto",
    out: str | Path | None = None,
    rounds: int = 5,
    measured_steps: int = 100,
    warmup_steps: int = 20,
    steps: int = 8,
    deadline_s: float | None = None,
    machines: MachineOptions = MachineOptions(),  # noqa: B008 - frozen
) -> StudyResults:
    """Proves each engine as `verify` does, and measures those that are proven, in `rounds` launches each.

    `results.engines` holds one Verdict per engine, with samples_per_second, ratio, peak_memory_mib, …
    """
    with _target(job) as target:
        setup = Setup(
            job=target,
            settings=_texts(settings),
            engines=_names(engines),
            engine_settings=_texts(engine_settings),
            launchers=_names(launchers),
            nproc=nproc,
            device=device,
            out=Path(out) if out else None,
            rounds=rounds,
            measured_steps=measured_steps,
            warmup_steps=warmup_steps,
            steps=steps,
            deadline_s=deadline_s,
            machines=machines,
        )
        return _study("compare", setup)


def run(
    job: Target = "digits",
    engine: str = "ddp",
    *,
    nproc: int | None = None,
    settings: Values | None = None,
    engine_settings: Values | None = None,
    launcher: str = "",
    device: str = "auto",
    out: str | Path | None = None,
    deadline_s: float | None = None,
    init: str | Path | None = None,
    evaluate_every: int | None = None,
    evaluate_steps: int | None = None,
    best: str = "",
    patience: int | None = None,
    log: str | Sequence[str] = (),
    machines: MachineOptions = MachineOptions(),  # noqa: B008 - frozen
) -> TrainResults | None:
    """Trains the whole job on one engine, and writes weights.safetensors into `out`.

    Returns None on a machine without rank 0, and on other ranks of an outer launcher.
    """
    with _target(job) as target:
        setup = Setup(
            job=target,
            settings=_texts(settings),
            engines=_names(engine),
            engine_settings=_texts(engine_settings),
            launchers=_names(launcher),
            nproc=nproc,
            device=device,
            out=Path(out) if out else None,
            deadline_s=deadline_s,
            machines=machines,
        )
        training = TrainOptions(
            Path(init) if init else None, evaluate_every, best, patience, evaluate_steps, _names(log)
        )
        return train(setup, training)


def evaluate(
    weights: str | Path,
    job: Target = "digits",
    *,
    nproc: int | None = None,
    settings: Values | None = None,
    launcher: str = "",
    device: str = "auto",
    out: str | Path | None = None,
    predictions: str | Path | None = None,
    deadline_s: float | None = None,
    machines: MachineOptions = MachineOptions(),  # noqa: B008 - frozen
) -> ScoreResults | None:
    """Evaluates the weights in a file on the job's evaluation: the same figures on any number of ranks.

    Returns None on a machine without rank 0, and on other ranks of an outer launcher.
    """
    with _target(job) as target:
        setup = Setup(
            job=target,
            settings=_texts(settings),
            engines=("ddp",),
            launchers=_names(launcher),
            nproc=nproc,
            device=device,
            out=Path(out) if out else None,
            deadline_s=deadline_s,
            machines=machines,
        )
        return evaluate_weights(setup, ScoreOptions(Path(weights), Path(predictions) if predictions else None))


def _study(command: str, setup: Setup) -> StudyResults:
    with Launches() as progress:
        outcome = run_study(command, setup, progress.show)
    if outcome is None:
        raise UserError(f"this machine has only run its ranks; the results are on {setup.machines.master_addr}")
    save(*outcome)
    return outcome[0]


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(given.replace(",", " ").split()) if isinstance(given, str) else tuple(given)


def _texts(given: Values | None) -> dict[str, str]:
    """Returns values as texts, as --set takes them."""
    return {name: str(value) for name, value in (given or {}).items()}


@contextmanager
def _target(job: Target) -> Iterator[str]:
    """Yields the name that workers load a job by. A function without a file, as in a notebook, is pickled to one."""
    if not callable(job):
        yield str(job)
        return
    module = sys.modules.get(getattr(job, "__module__", "") or "")
    file, name = getattr(module, "__file__", None), getattr(job, "__name__", "")
    if module is not None and module.__name__ != "__main__" and file and getattr(module, name, None) is job:
        yield f"{file}:{name}"
        return
    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="samestep-job-") as folder:
        pickled = Path(folder) / "job.pkl"
        try:
            pickled.write_bytes(cloudpickle.dumps((sys.path, job)))
        except Exception as error:
            raise UserError(
                f"the job cannot be pickled for other processes ({type(error).__name__}: {error}); write it into a "
                "file, and give its path"
            ) from error
        yield str(pickled)
