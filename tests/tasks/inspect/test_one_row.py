"""BatchNorm takes no single row: a step that has such a micro-batch, of the job or of an engine, is refused before any
rank starts; a proof has none where the job has none."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from inspected_job import demands, inspected_job
from ranks import engine_facts
from samestep import Job, Recipe
from samestep.commands.engine_rows import refusal
from samestep.tasks.inspect.engines import EngineDemands

IN_PARTS = "batch_norm_gets_one_row_in_a_micro_batch"


def job(rows: int = 64, last: str = "keep", images: bool = False, micro_batch: int | None = None) -> Job:
    inputs = torch.randn(rows, *((3, 4, 4) if images else (6,)), generator=torch.Generator().manual_seed(1))

    def model() -> nn.Module:
        torch.manual_seed(0)
        if images:  # each channel has several values in one row, which BatchNorm takes
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=TensorDataset(inputs, (inputs.flatten(1).sum(1) > 0).long()),
        global_batch=8,
        last=last,  # type: ignore[arg-type]
        micro_batch=micro_batch,
    )


@pytest.mark.parametrize("proves", [True, False])
@pytest.mark.parametrize(
    ("settings", "micro_batches", "step", "own_sizes"),
    [
        ({}, 4, None, True),  # the proof's own uneven batch would have such a micro-batch
        ({}, 8, 0, False),
        ({"rows": "60"}, 4, 7, False),  # the last step has 4 rows
        ({"rows": "60", "last": "drop"}, 4, None, False),
        ({"images": "yes"}, 8, None, False),
        ({"images": "yes", "rows": "60"}, 4, None, False),
    ],
)
def test_a_pipeline_whose_micro_batch_has_one_row(
    settings: Mapping[str, str], micro_batches: int, step: int | None, own_sizes: bool, proves: bool
) -> None:
    row = engine_facts("pipeline", 2, {"microbatches": str(micro_batches)})
    engines = EngineDemands(in_parts=demands(row).in_parts)
    facts = inspected_job(f"{__file__}:job", settings, 2, proves=proves, engines=engines)
    why = refusal(row, facts)
    expected = None if step is None else (IN_PARTS, step, "--set-engine microbatches")
    assert (why and (why.id, why.fields["step"], why.fields["setting"])) == expected
    assert facts.proof.rows == (facts.data.global_batch if own_sizes and proves else 0)


@pytest.mark.parametrize(
    ("settings", "proves", "said"),
    [
        ({}, True, None),
        ({}, False, None),
        ({"rows": "60"}, True, "batch_norm_gets_one_row"),
        ({"rows": "60"}, False, "batch_norm_gets_one_row"),
        ({"micro_batch": "1"}, False, IN_PARTS),
    ],
)
def test_so_is_one_of_replicas_and_a_run_is_not_refused_for_a_proof(
    settings: Mapping[str, str], proves: bool, said: str | None
) -> None:
    refused = inspected_job(f"{__file__}:job", settings, 4, proves=proves).refusals.of_replicas[4]
    assert (refused and refused.id) == said
