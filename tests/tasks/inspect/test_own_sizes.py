"""A job that takes only some numbers of rows is inspected and proven at sizes that it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from inspected_job import inspected_job
from samestep import Job, Recipe, UserError
from samestep.data.schedule import schedule_of
from samestep.records.inspection import JobFacts
from samestep.records.plan import ProveTask
from samestep.tasks.proof_job import proof_job

PART = 8  # rows


class Parts(nn.Module):
    """Normalises each 8 rows of a batch by themselves, as a ghost BatchNorm. always: in an evaluation, too."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.first, self.last = always, nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = self.first(rows)
        if self.always or self.training:
            hidden = F.layer_norm(hidden.view(-1, PART, 8).transpose(1, 2), [PART]).transpose(1, 2).reshape(-1, 8)
        return self.last(hidden)  # type: ignore[no-any-return]


def job(
    rows: int = 160, last: str = "keep", always: bool = False, evaluated: int = 64, micro_batch: int | None = None
) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Parts(always)

    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    y = (x.sum(1) > 0).long()
    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}),
        train=TensorDataset(x, y),
        evaluation=TensorDataset(x[:evaluated], y[:evaluated]),
        metrics={"right": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=32,
        last=last,  # type: ignore[arg-type]
        micro_batch=micro_batch,
    )


def facts(**settings: str) -> JobFacts:
    return inspected_job(f"{__file__}:job", settings, 2)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("rows", [160, 176, 170])
def test_the_proof_has_no_size_that_the_job_never_has(rows: int, replicas: int) -> None:
    found = facts(rows=str(rows), last="drop" if rows == 170 else "keep", always="yes")
    assert found.refusals.of_replicas == {1: None, 2: None} and found.proof.rows == found.data.global_batch
    training = ProveTask("sgd", 8, "float64", replicas, 0.05, rows=found.proof.rows)
    small = proof_job(job(rows, last="drop" if rows == 170 else "keep", always=True), training)
    schedule = schedule_of(small, replicas)
    parts = [part for rank in range(replicas) for part in schedule.micro_batches_of(rank, 8)]
    assert not any(part.rows % PART for part in parts) and parts[-1].epoch > 0
    assert small.evaluation is not None and not len(small.evaluation) % PART


def test_a_size_that_is_refused_is_named_and_the_remedy_helps() -> None:
    refused = facts(rows="170").refusals.of_replicas  # the last step has 10 rows
    for said in (refused[1], refused[2]):
        assert said and said.id == "job_refuses_a_number_of_rows"
        assert (said.fields["step"], said.fields["setting"]) == (5, "last=drop")
    assert facts(rows="170", last="drop").refusals.of_replicas == {1: None, 2: None}


def test_an_evaluation_of_another_size_is_named() -> None:
    assert facts(always="yes", evaluated="40").refusals.of_replicas == {1: None, 2: None}  # 32 rows, then 8
    with pytest.raises(UserError) as raised:
        facts(always="yes", evaluated="36")
    assert raised.value.message.id == "evaluation_rows_refused"


def test_a_job_that_takes_any_size_is_proven_on_an_uneven_one() -> None:
    found = inspected_job("digits", {}, 2)
    assert found.proof.rows != found.data.global_batch and found.refusals.of_replicas == {1: None, 2: None}
