"""Models whose evaluation has no loss, as torchvision's detection models, and metrics that need all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from inspected_job import inspected_job
from rank import detection
from ranks import Ranks
from samestep import Job, LRSchedule
from samestep.errors import UserError
from samestep.rank.evaluate import evaluate
from samestep.records.plan import Plan, RunTask
from samestep.reference import evaluation as reference
from samestep.tasks.inspect.dry_run import dry_evaluation
from samestep.world import World

TARGET = f"{detection.__file__}:job"


def whole() -> tuple[Job, float]:
    """Returns the job, and the mAP of its first weights, computed on all rows at once."""
    job, metric = detection.job(), detection.MeanAveragePrecision()
    rows: Any = job.evaluation
    images, targets = detection.collate(rows)
    metric.reset()
    with torch.no_grad():
        metric.update(job.model().eval()(images), targets)
    return job, metric.compute()


def test_the_metric_of_all_rows_is_that_of_one_pass_and_there_is_no_loss() -> None:
    job, expected = whole()
    found = evaluate(job, job.model(), World())
    played = reference.evaluate(job, job.model().state_dict(), "cpu", twice=True)
    assert found.means() == {"map": expected}
    assert played
    assert (played.sums, played.unsteady, played.whole) == (found.sums, (), ("map",))
    # No loss to choose the best weights by.
    assert inspected_job(TARGET, {}, 2).evaluation.metrics == {"map": "max"}


def test_ranks_find_the_value_of_one_process(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    weights = [str(tmp_path / f"{n}.safetensors") for n in (1, 2)]
    found = [
        ranks(n).work(Plan("", 0.0, TARGET, {}, "ddp", trainings=(RunTask(weights[n - 1]),))).training("run")
        for n in (1, 2)
    ]
    maps = [rank.evaluation.means for of_size in found for rank in of_size if rank.evaluation]
    assert len(maps) == 3
    assert maps[0].keys() == {"map"}
    assert maps[1] == maps[2] == pytest.approx(maps[0])


def test_a_criterion_for_training_alone_is_told_the_line_that_helps() -> None:
    job = replace(detection.job(), criterion=detection.losses)
    with pytest.raises(UserError, match="return None") as error:
        dry_evaluation(job, job.model(), "cpu")
    line = str(error.value).rpartition(": if ")[2]  # as it is printed
    names: dict[str, Any] = {}
    exec(f"def criterion(output, batch):\n    if {line}\n    return sum(output.values())", names)
    mended = replace(job, criterion=names["criterion"])
    assert not dry_evaluation(mended, mended.model(), "cpu").has_loss


def test_what_needs_the_loss_of_an_evaluation_without_one_is_refused() -> None:
    plateau = LRSchedule(lambda optimizer: ReduceLROnPlateau(optimizer), every="evaluation")
    by_loss = replace(detection.job(), scheduler=plateau)
    with pytest.raises(UserError, match="metric='map'"):
        dry_evaluation(by_loss, by_loss.model(), "cpu")
    by_map = replace(by_loss, scheduler=replace(plateau, metric="map"))
    assert not dry_evaluation(by_map, by_map.model(), "cpu").has_loss
    nothing = replace(detection.job(), metrics={})
    with pytest.raises(UserError, match="no metrics"):
        dry_evaluation(nothing, nothing.model(), "cpu")


class Many(detection.MeanAveragePrecision):
    """Computes several values, as torchmetrics' MeanAveragePrecision does."""

    def compute(self) -> Any:
        value = super().compute()
        return {"map": torch.tensor(value), "map_50": torch.tensor(value)}


def test_a_metric_of_several_values_is_told_the_line_that_chooses_one() -> None:
    job, expected = whole()
    many = replace(job, metrics={"map": Many()})
    with pytest.raises(UserError, match="subclass of Many") as error:
        evaluate(many, many.model(), World())
    line = str(error.value).rpartition("one of them: ")[2]

    class One(Many):
        def compute(self) -> Any:
            line_of_the_error = line.removeprefix("def compute(self): return super().compute()")
            return Many.compute(self)[eval(line_of_the_error)[0]]

    chosen = replace(job, metrics={"map": One()})
    assert evaluate(chosen, chosen.model(), World()).means() == {"map": pytest.approx(expected)}
