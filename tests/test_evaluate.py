"""Evaluation inside a training leaves no trace: the mode, the random stream and the buffers are as they were."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Subset
from torchmetrics import Metric

from conformance import jobs_drawn
from samestep.evaluate import evaluate
from samestep.inspection import inspect_job
from samestep.job import Batch
from samestep.loading import build
from samestep.run import Run
from samestep.world import World


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_mode_random_stream_and_buffers_as_they_were(training: bool) -> None:
    job = build("digits", {})
    model = job.model().train(training)
    frozen = model[0].eval()  # a part that its owner keeps in evaluation mode
    torch.manual_seed(5)
    before = torch.get_rng_state(), {name: buffer.clone() for name, buffer in model.named_buffers()}
    evaluate(job, model, World())
    assert model.training is training
    assert not frozen.training
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(buffer, before[1][name]) for name, buffer in model.named_buffers())


class Last(Metric):
    """The target of the last row: it shows in which order the chunks are put together."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx="cat")
        self.seen: list[torch.Tensor]

    def update(self, output: torch.Tensor, targets: torch.Tensor) -> None:
        self.seen.append(targets)

    def compute(self) -> torch.Tensor:
        return torch.cat(list(self.seen))[-1].float()


@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_are_put_together_in_their_order(workers: int) -> None:
    job = jobs_drawn.job(rows=40, global_batch=4)
    targets = [int(target) for _, _, target in job.evaluation]  # type: ignore[union-attr, attr-defined]
    rows = Subset(job.evaluation, range(21))  # type: ignore[arg-type]  # which is read by workers, where there are some
    job = replace(job, evaluation=rows, metrics={"last": Last()}, workers=workers)

    def pairs(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([inputs for inputs, _, _ in samples]), torch.stack([target for _, _, target in samples])

    def criterion(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(output, batch.targets)

    paired = replace(job, collate=pairs, forward=lambda model, batch: model(batch.inputs), criterion=criterion)
    found = evaluate(paired, paired.model(), World())
    assert (found.rows, found.sums["last"], found.indices) == (21, targets[20], list(range(21)))


def test_what_torchmetrics_says_is_better_is_known() -> None:
    found = inspect_job(f"{Path(__file__).parent}/jobs/watched.py:job", {}, 2, 8, "cpu")["metrics"]
    assert {name: found[name] for name in ("loss", "perplexity", "f1", "accuracy")} == {
        "loss": "min",
        "perplexity": "min",
        "f1": "max",
        "accuracy": "max",
    }


def test_evaluating_between_steps_is_no_step() -> None:
    job = jobs_drawn.job(rows=16, global_batch=4)

    class Looks:
        def begin(self, state: object) -> None: ...

        def is_due(self, done: int, steps_per_epoch: int) -> bool:
            return done == 2

        def look(self, done: int) -> bool:
            time.sleep(1)
            return False

    run = Run(job, World(), 4, watch=Looks())
    model = job.model()
    run.begin(model, torch.optim.SGD(model.parameters()))
    for batch in run.batches():
        run.step(run.loss(model, batch))
    assert len(run.observations()["step_s"]) == 4 and max(run.observations()["step_s"]) < 1
