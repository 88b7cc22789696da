"""Engine fsdp on a mesh takes the step of one process: replicas of shards (HSDP), shards of tensor parallel layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from command import TESTS
from ranks import Ranks, engine_facts, prove

HEADS = f"{TESTS}/mutations/jobs.py:heads"


@pytest.fixture(scope="module")
def reference_rank() -> Iterator[Ranks]:
    with Ranks(1) as rank:
        yield rank


@pytest.mark.parametrize(
    ("mesh", "replicas", "complete"),
    [
        pytest.param("data=2,shard=2", 4, True, marks=pytest.mark.full),
        pytest.param("shard=2,tensor=2", 2, True, marks=pytest.mark.check),
        pytest.param("data=2,shard=2,tensor=2", 4, False, marks=pytest.mark.full),
        pytest.param("shard=3,tensor=2", 3, False, marks=pytest.mark.full),
        pytest.param("data=3", 3, False, marks=pytest.mark.full),
    ],
)
def test_it_takes_the_step_of_one_process(mesh: str, replicas: int, complete: bool, reference_rank: Ranks) -> None:
    facts = engine_facts("fsdp", 0, mesh=mesh)
    assert facts.mesh and facts.replicas == replicas
    with Ranks(facts.mesh.size, threads=True) as ranks:
        verdict = prove(reference_rank, ranks, HEADS, "fsdp", complete=complete, mesh=mesh)
    assert verdict.verdict == "same", verdict
