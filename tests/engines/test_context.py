"""Engine context: the step of one process on every mesh and with each way of computing attention, with dropout in the
blocks, padded targets, gradients that accumulate and clipping."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from command import TESTS
from inspected_job import demands, inspected_job
from ranks import Ranks, engine_facts, prove
from samestep.commands.engine_rows import refusal

SEQUENCES = f"{TESTS}/mutations/jobs.py:sequences"


@pytest.fixture(scope="module")
def reference_rank() -> Iterator[Ranks]:
    with Ranks(1) as rank:
        yield rank


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("data=2,sequence=2", "ring"),
        pytest.param("sequence=2", "gather", marks=pytest.mark.check),
        pytest.param("sequence=4", "ulysses", marks=pytest.mark.check),
        pytest.param("sequence=4", "ring", marks=pytest.mark.full),
        pytest.param("sequence=8", "gather", marks=pytest.mark.full),
        pytest.param("data=3,sequence=2", "gather", marks=pytest.mark.full),
        pytest.param("data=2", "gather", marks=pytest.mark.full),
    ],
)
def test_it_takes_the_step_of_one_process(mesh: str, how: str, reference_rank: Ranks) -> None:
    settings = {"how": how}
    facts = engine_facts("context", 0, settings, mesh)
    assert facts.mesh and facts.layout
    with Ranks(facts.mesh.size, threads=True) as ranks:
        verdict = prove(
            reference_rank, ranks, SEQUENCES, "context", engine_settings=settings, complete=False, mesh=mesh
        )
    assert verdict.verdict == "same", verdict
    assert facts.layout.replicas == facts.mesh.replicas


@pytest.mark.parametrize(
    ("ranks", "how", "said"),
    [
        (2, "gather", ""),
        (3, "gather", "sequence_does_not_divide"),
        pytest.param(8, "ulysses", "heads_do_not_divide", marks=pytest.mark.check),
    ],
)
def test_what_does_not_divide_is_refused_before_any_rank_starts(ranks: int, how: str, said: str) -> None:
    row = engine_facts("context", ranks, {"how": how})
    facts = inspected_job(SEQUENCES, {}, ranks, engines=demands(row))
    why = refusal(row, facts)
    assert (why.id if why else "") == said
    if not said:
        assert facts.divided["context"].id == "context_ranks_divide_the_sequence"
