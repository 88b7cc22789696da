"""SyncBatchNorm: the reference takes statistics over all ranks, real ranks agree, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from conformance import jobs_synced
from inspected_job import inspected_job
from ranks import Ranks, engine_facts, prove
from samestep import reference
from samestep.commands.engine_rows import refusal
from samestep.engine import Layout
from samestep.errors import UserError
from samestep.message import Message, message
from samestep.tasks.run_engine import with_sync_batchnorm
from samestep.world import World

JOB = f"{Path(__file__).parent}/jobs_synced.py:job"


@pytest.mark.parametrize("settings", [{}, {"micro_batch": "2"}])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_statistics_take_the_references_step(
    size: int, settings: dict[str, str], ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    verdict = prove(reference_rank, ranks(size), JOB, "ddp", {"rows": "47", **settings})
    assert verdict.verdict == "same", verdict


def test_and_without_the_setting_they_are_seen_to_differ(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(2), JOB, "ddp", {"sync_batchnorm": "false"})
    assert verdict.verdict == "differs"


@pytest.mark.parametrize("own", [True, False])
def test_the_reference_of_three_ranks_is_that_of_one(own: bool) -> None:
    job = jobs_synced.job(own=own)
    one, three, apart = (
        reference.play(each, Layout(replicas), 12)
        for each, replicas in ((job, 1), (job, 3), (jobs_synced.job(own=own, sync_batchnorm=False), 3))
    )
    differs = [max(float((one.state[n] - p.state[n]).abs().max()) for n in one.state) for p in (three, apart)]
    assert differs[0] < 1e-5 < 1e-2 < differs[1]


def test_dropout_is_not_proven_with_it() -> None:
    with pytest.raises(UserError, match="without dropout"):
        reference.play(jobs_synced.job(dropout=0.5), Layout(2), 1)


@pytest.mark.parametrize(
    ("engine", "settings", "refused"),
    [
        ("ddp", {}, message("sync_batchnorm_needs_gpus")),
        ("horovod", {}, message("sync_batchnorm_does_not_find_other_ranks", engine="horovod", others=[])),
        (
            "ddp",
            {"own": "true", "rows": "21", "global_batch": "10"},
            message("rank_without_rows_under_sync_batchnorm", step=2, rank=1),
        ),
    ],
)
def test_what_it_cannot_do_is_refused(engine: str, settings: dict[str, str], refused: Message) -> None:
    job = inspected_job(JOB, {"own": "false", **settings}, 2)
    assert refusal(engine_facts(engine, 2), job) == refused


def test_layers_are_converted_where_there_are_other_ranks() -> None:
    job = jobs_synced.job(own=False)
    kinds = [{type(m) for m in with_sync_batchnorm(job, World(size=size)).model().modules()} for size in (1, 2)]
    assert nn.BatchNorm2d in kinds[0] and nn.SyncBatchNorm not in kinds[0]
    assert nn.SyncBatchNorm in kinds[1] and nn.BatchNorm2d not in kinds[1]
    assert torch.equal(
        with_sync_batchnorm(job, World(size=2)).model().state_dict()["0.weight"], job.model().state_dict()["0.weight"]
    )
