"""Writes the manifests of a training for Kubernetes, and its batch script for Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samestep.commands import results_folder
from samestep.commands.command_options import RunOptions, SlurmOptions
from samestep.commands.options import arguments
from samestep.commands.setup import Setup
from samestep.commands.training_options import TrainOptions, file_of
from samestep.errors import UserError
from samestep.launch import submit as templates
from samestep.launch.submit import Training

# The fields of RunOptions that a manifest or a batch script writes by itself, and those that a manifest decides:
WRITTEN = ("engine", "settings", "engine_settings", "nproc", "device", "nnodes", "threads")
DECIDED = ("out", "launcher", "hosts", "port", "node_rank", "master_addr")


def kubernetes(setup: Setup, given: RunOptions, kind: str, image: str, claim: str) -> str:
    """Returns the manifests of a training, for `kubectl apply -f -`. Raises UserError for options that they set."""
    given.check_values()
    words = arguments(given, RunOptions, without=(*WRITTEN, *DECIDED))
    for flag in arguments(given, RunOptions, without=WRITTEN):
        if flag not in words:
            raise UserError(f"{flag} is decided by the manifests that --to writes; leave it out")
    gpus = 0 if setup.device == "cpu" else setup.nproc or 1
    return templates.manifests(kind, _training(setup, words, gpus), image, claim)


def slurm_script(given: SlurmOptions) -> tuple[Path, str]:
    """Returns the folder for the results of a training under Slurm, and its batch script."""
    if not str(given.job).strip():
        raise UserError("the name of the job is empty; give a job's name, or file.py:function")
    given.check_values()
    setup = given.setup(str(given.job))
    words = arguments(replace(given, init=file_of(given.init, "--init")), TrainOptions)
    results = (setup.out or results_folder.dated_folder(setup.job)).resolve()
    return results, templates.slurm_script(
        _training(setup, words, given.gpus_per_node), results, given.time, given.sbatch
    )


def submit_to_slurm(results: Path, script: str) -> str:
    """Submits a batch script with sbatch. Returns a sentence about the job."""
    path = results_folder.write_into(results, "slurm.sh", script)
    number = templates.sbatch(path)
    return f"job {number} is in the queue; its script is {path}, its output goes to {results}/slurm-{number}.out\n"


def _training(setup: Setup, words: Sequence[str], gpus: int) -> Training:
    if setup.machines.min_nnodes:
        raise UserError(
            f"--nnodes {setup.machines.nnodes}: a script or a manifest starts a fixed number of machines; give one"
        )
    return Training(
        job=setup.job,
        nnodes=setup.machines.max_nnodes or 1,
        nproc=setup.nproc or 1,
        gpus=gpus,
        engine=setup.engines[0],
        settings=[f"{key}={value}" for key, value in setup.settings.items()],
        engine_settings=[f"{key}={value}" for key, value in setup.engine_settings.items()],
        options=words,
        threads=setup.machines.threads or 0,
    )
