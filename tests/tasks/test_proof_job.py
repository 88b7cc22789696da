"""A proof on fewer rows keeps what it must show: an uneven last batch, and rows for every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conformance import jobs_job
from conformance.jobs_drawn import job as drawn
from samestep.job import Job
from samestep.records.plan import ProveTask
from samestep.tasks.proof_job import (
    proof_job,
    rows_of_proof,
    subset_length,
    with_fewer_rows,
    with_own_tensors,
)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("length", range(96, 128, 5))
def test_every_rank_has_two_rows_in_the_last_batch_too(replicas: int, length: int) -> None:
    training = ProveTask("sgd", 8, "float64", replicas, 0.05, rows=3 * replicas)
    rows = subset_length(length, training.rows, training)
    last = rows % training.rows or training.rows
    assert last // replicas >= 2 or replicas == 1
    assert replicas == 1 or last % replicas, "the last batch divides evenly: unequal weights are not proven"
    assert rows > training.rows, "no whole batch"


def test_a_cheap_job_keeps_its_batch_and_a_dear_one_its_micro_batches() -> None:
    job: Job = drawn(rows=200, global_batch=64, micro_batch=8)
    assert rows_of_proof(job, 2, forward_flop=1e3, parameters=1000) == (0, False)
    rows, costly = rows_of_proof(job, 2, forward_flop=1e8, parameters=1000)
    assert rows == 2 * 4 * 4 and not costly  # four micro-batches on each rank, of four rows
    assert rows_of_proof(job, 2, forward_flop=3.6e9, parameters=1000) == (rows, True)
    assert rows_of_proof(job, 2, forward_flop=1e3, parameters=10_000_000) == (0, True)
    small = with_fewer_rows(job, rows, 2)
    assert (small.global_batch, small.micro_batch) == (rows, 4)


def test_the_weights_of_a_batch_are_added_up_in_float64() -> None:
    """In parts they are then those of the whole: rounding to float32 would be taken for a mistake of the job."""
    classes = torch.tensor([0.3, 1.0, 2.5, 4.1])

    def weigh(batch: Any) -> torch.Tensor:
        of_class = torch.zeros(4).index_add_(0, batch, classes[batch].float())
        return of_class[:3].sum()

    job = replace(jobs_job.averaged(), batch_weight=weigh)
    rows = torch.randint(4, (2000,), generator=torch.Generator().manual_seed(0))
    for dtype, is_exact in (("float64", True), ("float32", False)):
        weight: Any = proof_job(job, ProveTask("sgd", 8, dtype, 2, 0.05)).batch_weight
        parts = sum(float(weight(part)) for part in rows.split(300))
        assert (abs(parts - float(weight(rows))) < 1e-12 * parts) is is_exact


def test_a_proof_leaves_the_tensors_alone_that_its_models_share() -> None:
    """A graph's features in a buffer, pretrained vectors in an embedding: what a training writes stays its own."""
    vectors, views = torch.ones(4, 2), torch.zeros(6)

    def model() -> nn.Module:
        net = nn.Sequential(nn.Embedding.from_pretrained(vectors, freeze=False), nn.Linear(2, 2))
        net.register_buffer("features", vectors)
        net.register_buffer("row", views[:3], persistent=False)
        net.register_buffer("rows", views)
        return net

    first, second = with_own_tensors(model()), model()
    with torch.no_grad():
        for tensor in (*first.parameters(), first.features, first.row):
            tensor.add_(1)
    assert torch.equal(second[0].weight, torch.ones(4, 2)) and not views.any()
    assert first.rows.tolist() == [1, 1, 1, 0, 0, 0] and "row" not in first.state_dict()
    assert torch.equal(first[0].weight, first.features), "the two shared their memory before"


def test_a_proof_leaves_a_models_counters_and_complex_numbers_as_they_are() -> None:
    """A counter has a second name in a dict; rotary positions stay complex; numpy's views are other storages."""
    table = np.arange(6, dtype=np.float32)

    def model() -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_buffer("count", torch.zeros((), dtype=torch.long))
        net.counters = {"count": net.count}
        net.register_buffer("positions", torch.tensor([1j, 2j]))
        net.register_buffer("conjugate", net.positions.conj())
        net.register_buffer("part", torch.from_numpy(table[:2]))
        net.register_buffer("whole", torch.from_numpy(table))
        return net

    small = proof_job(replace(drawn(), model=model), ProveTask("sgd", 8, "float64", 2, 0.05)).model()
    small.counters["count"].add_(1)
    assert int(small.count) == 1
    assert small.positions.tolist() == [1j, 2j] and small.conjugate.tolist() == [-1j, -2j]
    assert small.whole.tolist() == [0, 1, 2, 3, 4, 5] and small.part.tolist() == [0, 1]
    assert small.weight.dtype == torch.float64
