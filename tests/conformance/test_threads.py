"""Ranks as threads train what ranks as processes do: the same verdict, losses, rows and weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from lane_marks import in_turn
from ranks import KeptRanks, Ranks, engine_facts, judged, proof_plan, reference_plan
from samestep.records.record import Record
from samestep.records.results import Verdict
from samestep.records.training_record import TrainingRecord

ENGINES, JOBS, SIZES = ("ddp", "fsdp", "zero", "amp"), ("conv", "tied", "transformer"), (2, 3, 4)
CASES = [(engine, job, size) for engine in ENGINES for job in JOBS for size in SIZES]


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptRanks]:
    with KeptRanks() as kept_ranks:
        yield kept_ranks


def observed(record: Record, size: int) -> dict[tuple[int, str], TrainingRecord]:
    return {(rank, name): record.ranks[rank].trainings[name] for rank in range(size) for name in ("sgd", "user")}


@pytest.mark.parametrize(
    ("engine", "job", "size"), [pytest.param(*case, marks=in_turn(8, number)) for number, case in enumerate(CASES)]
)
def test_threads_train_what_processes_do(engine: str, job: str, size: int, kept: KeptRanks) -> None:
    """At 2 ranks to the last bit. From 3 on processes add in the order of gloo's ring, threads in that of the ranks."""
    facts = engine_facts(engine, size)
    reference = kept.of(1).played(reference_plan(f"jobs:{job}", size, {}, facts))
    verdicts, trainings = list[Verdict](), list[dict[tuple[int, str], TrainingRecord]]()
    with Ranks(size, threads=True) as threads:
        for ranks in (kept.of(size), threads):
            records: list[Record] = []

            def train(loop, _, ranks=ranks, records=records):  # type: ignore[no-untyped-def]
                records.append(ranks.work(proof_plan(loop, f"jobs:{job}", engine, size, {}, facts)))
                return records[0]

            verdicts.append(judged(reference, facts, train))
            trainings.append(observed(records[0], size))
    assert verdicts[0].verdict == verdicts[1].verdict == ("approximate" if engine == "amp" else "same")
    assert size > 2 or verdicts[0] == verdicts[1]
    for place, processes in trainings[0].items():
        assert trainings[1][place].micro_batches == processes.micro_batches
        assert trainings[1][place].rates == processes.rates
        np.testing.assert_allclose(trainings[1][place].losses, processes.losses, rtol=1e-11 if size > 2 else 0)
