"""The results of `samestep run` and `samestep evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.message import Message
from samestep.records.inspection import Values
from samestep.records.spot_check import SpotCheck


@dataclass(frozen=True)
class InitialWeights:
    """The file that a training started from."""

    file: str
    sha256: str


@dataclass(frozen=True)
class RunResults:
    """The results of a training."""

    job: str
    """The job's name or path."""

    settings: Mapping[str, str]
    """The job's settings as --set gives them, without secrets: name -> text."""

    launcher: str
    """The launcher's name."""

    world_size: int
    """The number of ranks over all machines."""

    threads_per_rank: int
    """The number of threads of each rank."""

    engine: str
    """The engine's name."""

    engine_settings: Values
    """The settings that --set-engine has changed from their defaults: name -> value."""

    global_batch: int
    """The number of rows of an optimizer step, over all ranks."""

    init: InitialWeights | None
    """The file that the training started from; None: the weights that the job's model is built with."""

    steps: int
    """The number of optimizer steps taken, with those of earlier launches."""

    asked_steps: int
    """The number of optimizer steps of the whole training."""

    resumed_from: int
    """The number of optimizer steps that earlier launches have taken."""

    stopped: str | None
    """'requested': ended by a graceful stop. 'early': ended by patience. None: the training ran to its end."""

    seconds: float
    """The seconds of the steps of this launch."""

    skipped_steps: int
    """The number of steps that did not update the weights, as after an overflow."""

    final_loss: float | None
    """The loss of rank 0's last micro-batch; None: this launch took no step."""

    curve: list[dict[str, float]]
    """The evaluations in their order, each {'step': …, 'loss': …, metric: …}."""

    weights_of_step: int | None
    """The number of optimizer steps after which the saved weights were taken; None: there was no evaluation."""

    evaluation: Mapping[str, float] | None
    """The evaluation of the saved weights, name -> value; None: there is none."""

    evaluation_rows: int
    """The number of rows of the evaluation dataset; 0: the job has no evaluation."""

    weights: str
    """The path of the file with the saved weights."""

    export: str | None
    """The folder to which the trained model is exported for from_pretrained; None: none was asked for."""

    wait_share: float | None
    """The share of the time that the training waited for data, 0 to 1; None: not measured."""

    loader_ceiling: float | None
    """The rows per second that the loading processes can deliver; None: not measured."""

    demand: float | None
    """The rows per second that the training could take if it never waited; None: not measured."""

    advice: Message | None
    """The setting that would shorten the wait for data; None: the wait is short."""

    traces: tuple[str, ...] = ()
    """The paths of the files that --profile has written."""

    monitor: str | None = None
    """The path of the page about what the training used; None: there is no page."""

    changes: tuple[str, ...] = ()
    """What differed when the training was continued on other data by --resume-changed-data, with the step."""

    spot_checks: tuple[SpotCheck, ...] = ()
    """The steps that were replayed in one process."""


@dataclass(frozen=True)
class EvaluateResults:
    """The evaluation of the weights in a file."""

    job: str
    """The job's name or path."""

    settings: Mapping[str, str]
    """The job's settings as --set gives them, without secrets: name -> text."""

    launcher: str
    """The launcher's name."""

    world_size: int
    """The number of ranks over all machines."""

    weights: str
    """The path of the file with the weights."""

    sha256: str
    """The SHA-256 digest of that file."""

    evaluation: Mapping[str, float]
    """The evaluation, name -> value."""

    evaluation_rows: int
    """The number of rows of the evaluation dataset."""

    predictions: str | None
    """The file with the model's outputs; None: none was asked for."""
