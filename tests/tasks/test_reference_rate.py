"""The reference finds a learning rate for SGD at which every layout trains, whatever the loss is multiplied by."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe
from samestep.proof.plan import plain_layout
from samestep.records.plan import SGD_LR, LayoutPlan, ReferencePlan
from samestep.records.reference_record import ReferenceLayoutRecord
from samestep.tasks.play_reference import play_reference
from samestep.world import World


def make(scale: float = 1.0, breaks_at: float = math.inf, rows: int = 8) -> Job:
    """A regression, its loss times `scale`, and infinite on `rows` rows once an output is above `breaks_at`."""

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        loss = scale * (output - batch.inputs.sum(1, keepdim=True)).square().mean()
        return loss * math.inf if len(output) == rows and output.abs().max() > breaks_at else loss

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(3, 1)

    data = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    return Job(
        model=model,
        criterion=criterion,
        optimizer=Recipe(torch.optim.Adam, {"lr": 1e-4}),
        train=TensorDataset(data),
        collate=lambda samples: torch.stack([row for (row,) in samples]),
        global_batch=8,
    )


def play(job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[ReferenceLayoutRecord]:
    # Instead of reading it from a file.
    monkeypatch.setattr("samestep.tasks.play_reference.build", lambda *_, **__: job)
    layouts = (LayoutPlan(replicas=2), plain_layout())
    return play_reference(ReferencePlan(str(folder), 0.0, "job.py", {}, layouts, steps=8, replicas=2), World())


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e4, 1e9])
def test_a_loss_of_any_scale_moves_the_weights_and_does_not_explode(
    scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layout in play(make(scale), tmp_path, monkeypatch):
        played = layout.trainings["sgd"][0]
        losses = [part.loss or 0.0 for part in played.micro_batches[0]]
        assert max(losses) < 20 * losses[0] and played.moved["weight"].distance > 1e-5
        assert (layout.sgd_lr == SGD_LR) == (scale == 1.0)


@pytest.mark.parametrize("rows", [8, 4])
def test_a_rate_that_one_of_the_layouts_does_not_take_is_lowered_for_all(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain training, which comes second, has 8 rows a step; the two replicas 4 each."""
    layouts = play(make(breaks_at=1.0, rows=rows), tmp_path, monkeypatch)
    (rate,) = {layout.sgd_lr for layout in layouts}
    assert rate < SGD_LR and all(len(layout.trainings["sgd"]) == 3 for layout in layouts)
    assert all(
        math.isfinite(part.loss or 0.0) for each in layouts for part in each.trainings["sgd"][0].micro_batches[0]
    )
