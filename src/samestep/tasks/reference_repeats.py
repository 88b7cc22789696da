"""Refuses a job that does not repeat itself: no two trainings of it could be compared."""

from __future__ import annotations

from math import isnan

from samestep import reference
from samestep.errors import UserError
from samestep.job import Job
from samestep.message import message


def _check_samples_repeat(job: Job, device: str) -> None:
    """Raises UserError when a sample has other values when it is read again."""
    rows = list(range(min(2, len(job.train))))
    first, second = (reference.digests(reference.fetch(job, rows, 0, device), len(rows)) for _ in range(2))
    if first != second:
        raise UserError(message("sample_differs_when_read_again"))


def moved_parameters(job: Job, device: str, *, checked: bool) -> list[str]:
    """The parameters that a forward pass moves. checked: raises UserError for what gives other values each time."""
    if checked:
        _check_samples_repeat(job, device)
    repeatability = reference.repeatability(job, device)
    if checked:
        for first, second in repeatability.losses:
            _check_same(first, second, device)
    return repeatability.moved


def check_repeats(result: reference.TrainingResult, again: reference.TrainingResult, device: str) -> None:
    """Raises UserError when the same training gives other losses the second time; then nothing can be proven."""
    for first, second in zip(result.micro_batches[0], again.micro_batches[0]):
        _check_same(first.loss, second.loss, device)


def _check_same(first: float, second: float, device: str) -> None:
    if first == second or isnan(first) or (device != "cpu" and abs(first - second) <= 1e-6 * abs(first)):
        return
    raise UserError(message("loss_differs_when_computed_again", first=first, second=second))
