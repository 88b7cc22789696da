"""The Python API: samestep.verify, compare, run, evaluate, … for notebooks and scripts. See docs/python.md.

Each function does what the command of the same name does, and returns typed results; its processes have ended when it
returns. It raises samestep.UserError for a mistake, and samestep.TrainingFailed for a training that fails.
The command line calls `verify_or_compare`, `train_job` and `evaluate_weights`, which take a command's options as one
object.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from samestep.commands import run as running
from samestep.commands.collectives import collectives as measure_collectives
from samestep.commands.command_options import (
    CollectivesOptions,
    CompareOptions,
    EvaluateOptions,
    ProofOptions,
    RunOptions,
    Target,
    VerifyOptions,
)
from samestep.commands.compare import compare_engines
from samestep.commands.options import takes
from samestep.commands.results_folder import release_folders, remove_unused_folders
from samestep.commands.runs import runs as runs
from samestep.errors import TrainingFailed, UserError
from samestep.records.collectives import CollectiveResults
from samestep.records.files import naming_full_disks
from samestep.records.results import CompareResults
from samestep.records.run_results import EvaluateResults, RunResults
from samestep.report.language import text, with_english


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> CompareResults:
    """Proves that each engine computes the same training as the reference, one process that computes every rank's part.

    job: a function that returns a Job, the path of a file (its function `job`, or file.py:function), or the name of a
    built-in job. engines: empty: all of them. settings: of the job's function; engine_settings: of the engines, as
    in {"fsdp.wrap": "root"}. steps: optimizer steps of each training of the proof. out: the folder for the results.
    deadline_s: seconds after which a launch is ended. stall_s: seconds without progress after which the rank that hangs
    is named, and the launch ended; 0: never. resume: interrupt each training, and continue it from a checkpoint in a
    second launch, on resume_nproc ranks of resume_engine. `results.engines` holds one Verdict per engine.
    """
    return _on_this_machine(verify_or_compare("verify", options), options)


@takes(CompareOptions)
def compare(options: CompareOptions) -> CompareResults:
    """Proves each engine as `verify` does, and measures those that are proven, in `rounds` launches each.

    Of each launch, warmup_steps are left out and measured_steps count.
    `results.engines` holds one Verdict per engine, with samples_per_second, ratio, peak_memory_mib, …
    """
    return _on_this_machine(verify_or_compare("compare", options), options)


@takes(RunOptions)
def run(options: RunOptions) -> RunResults | None:
    """Trains the whole job on one engine, and writes weights.safetensors into `out`.

    init: weights to start from. evaluate_every: epochs from one evaluation to the next; 0: only the last.
    evaluate_steps: optimizer steps from one to the next. best: the metric whose best weights are kept, as 'accuracy' or
    'error:min'. patience: evaluations without a better one after which the training ends. log: 'csv', 'tensorboard' or
    'wandb', or several. checkpoint_every: '500s', '1000steps' or '1epoch'; keep: how many checkpoints stay; resume:
    'auto', 'never', or a checkpoint's path. export: the folder that from_pretrained is to load. Returns None on a
    machine without rank 0, and on other ranks of an outer launcher.
    """
    return train_job(options)


@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> EvaluateResults | None:
    """Evaluates the weights in a file on the job's evaluation: the same figures on any number of ranks.

    predictions: a new .npy file for the model's outputs.
    Returns None on a machine without rank 0, and on other ranks of an outer launcher.
    """
    return evaluate_weights(options)


@takes(CollectivesOptions)
def collectives(options: CollectivesOptions) -> CollectiveResults | None:
    """Checks the values of torch.distributed's collectives on these ranks, then measures them.

    op: names of collectives; empty: all. sizes: of the measured messages in bytes, '1KiB:16MiB' or a list; '0': none.
    dtype: those that are checked, of which the first is measured. seconds: of the measurement of one size.
    `results.wrong` holds each wrong value, `results.curves` the latency and bandwidth of each collective.
    Returns None on a machine without rank 0, and on other ranks of an outer launcher.
    """
    with _one_at_a_time():
        return measure_collectives(options)


def verify_or_compare(command: str, options: ProofOptions, typed: str = "") -> CompareResults | None:
    """Runs verify or compare. Returns None on a machine that is not the first. typed: the command line, for the
    report."""
    with _call(options.job) as target:
        return compare_engines(command, options, target, typed)


def train_job(options: RunOptions, dry_run: bool = False) -> RunResults | None:
    """Runs a training. dry_run: prints the shell line that would start it, and returns None."""
    with _call(options.job) as target:
        return running.run(options.setup(target), options, dry_run=dry_run)


def evaluate_weights(options: EvaluateOptions) -> EvaluateResults | None:
    """Runs an evaluation of weights."""
    with _call(options.job) as target:
        return running.evaluate(options.setup(target), options)


def _on_this_machine(results: CompareResults | None, options: ProofOptions) -> CompareResults:
    if results is None:
        first = options.machines.master_addr
        raise UserError(f"this machine has run its ranks; the results are on the first one ({first}): read them there")
    return results


_one_call = threading.Lock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Runs one call at a time, because all share the fork servers: another thread's call waits."""
    with _one_call, naming_full_disks():
        try:
            yield
        except (UserError, TrainingFailed) as error:
            if isinstance(error, UserError):
                remove_unused_folders()
            if not error.message.english:
                error.message = with_english(error.message)
            raise
        finally:
            release_folders()


@contextmanager
def _call(job: Target) -> Iterator[str]:
    """Runs one call at a time. Yields the name that workers load the job by."""
    with _one_at_a_time(), _target(job) as target:
        yield target


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

    name = name or type(job).__name__
    with tempfile.TemporaryDirectory(prefix="samestep-job-") as folder:
        pickled = Path(folder) / "job.pkl"
        try:
            pickled.write_bytes(cloudpickle.dumps((sys.path, cloudpickle.dumps(job))))
        except Exception as error:
            raise UserError(
                f"the job cannot be pickled for other processes ({type(error).__name__}: {error}); write it into a "
                "file, and give its path"
            ) from error
        try:
            yield str(pickled)
        except (UserError, TrainingFailed) as error:
            sentence = text(error.message, "en").replace(str(pickled), name)  # the user knows no such file
            error.message = replace(error.message, english=sentence)
            raise
