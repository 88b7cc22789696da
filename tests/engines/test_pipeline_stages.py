"""Engine pipeline: the step of one process with every schedule of torch and on every mesh, also where micro-batches
have no rows; checkpoints from one mesh to another; what is refused before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from command import TESTS
from inspected_job import demands, inspected_job
from lane_marks import CHECK, FULL
from ranks import Ranks, engine_facts, prove
from samestep.commands.engine_rows import refusal
from samestep.records.inspection import JobFacts
from samestep.records.plan import Plan, RunTask
from samestep.world.mesh import parse_mesh

DIVISIBLE = f"{TESTS}/conformance/jobs_divided.py:job"
DEEP, HEADS = (f"{TESTS}/mutations/jobs.py:{name}" for name in ("deep", "heads"))


@pytest.fixture(scope="module")
def reference_rank() -> Iterator[Ranks]:
    with Ranks(1) as rank:
        yield rank


@pytest.mark.parametrize(
    ("mesh", "schedule", "complete"),
    [
        pytest.param("data=2,stage=2", "ZBVZeroBubble", False, marks=FULL),
        pytest.param("stage=2", "1F1B", True, marks=FULL),
        pytest.param("stage=2", "Interleaved1F1B", False, marks=FULL),
        pytest.param("stage=2", "InterleavedZeroBubble", False, marks=FULL),
        pytest.param("stage=2", "DualPipeV", False, marks=FULL),
        pytest.param("stage=2", "LoopedBFS", False, marks=FULL),
        pytest.param("stage=4", "GPipe", False, marks=FULL),
        pytest.param("data=2,stage=2", "1F1B", True, marks=FULL),
        pytest.param("data=2", "1F1B", False, marks=FULL),
        pytest.param("stage=2,shard=2", "1F1B", True, marks=CHECK),
        pytest.param("stage=2,shard=2", "ZBVZeroBubble", False, marks=FULL),
        pytest.param("stage=2,shard=2", "Interleaved1F1B", False, marks=FULL),
        pytest.param("stage=2,data=2,shard=2", "GPipe", False, marks=FULL),
    ],
)
def test_it_takes_the_step_of_one_process(mesh: str, schedule: str, complete: bool, reference_rank: Ranks) -> None:
    facts = engine_facts("pipeline", 0, mesh=mesh)
    assert facts.mesh and facts.layout
    settings = {"schedule": schedule}
    with Ranks(facts.mesh.size, threads=True) as ranks:
        verdict = prove(reference_rank, ranks, DEEP, "pipeline", engine_settings=settings, complete=complete, mesh=mesh)
    assert verdict.verdict == "same", verdict
    assert facts.layout.replicas == facts.mesh.replicas


@pytest.mark.check
def test_averages_of_sharded_stages_are_those_of_one_process(reference_rank: Ranks) -> None:
    with Ranks(4, threads=True) as ranks:
        verdict = prove(reference_rank, ranks, DEEP, "pipeline", {"ema": "0.9"}, mesh="stage=2,shard=2")
    assert verdict.verdict == "same", verdict


@pytest.mark.check
def test_sharded_stages_have_layers_for_some_rows(reference_rank: Ranks) -> None:
    """Of two replicas one calls such a layer, or none does, and so had the rows on which the stages were tried."""
    settings = {"arch": "rare", "global_batch": "8"}
    with Ranks(4, threads=True) as ranks:
        verdict = prove(reference_rank, ranks, DIVISIBLE, "pipeline", settings, mesh="stage=2,shard=2")
    assert verdict.verdict == "same", verdict


def inspected(mesh: str, size: int, given: Mapping[str, str] | None = None) -> tuple[JobFacts, Any]:
    row = engine_facts("pipeline", size, given, mesh)
    return inspected_job(DEEP, {}, size, engines=demands(row)), row


@pytest.mark.parametrize(
    ("mesh", "size", "given", "said"),
    [
        ("stage=2", 2, None, None),
        ("tensor=2", 2, None, "engine_does_not_take_axis"),
        ("stage=4", 4, {"microbatches": "3"}, "fewer_micro_batches_than_stages"),
        ("stage=2", 2, {"schedule": "2F2B"}, "pipeline_has_no_such_schedule"),
        ("stage=9", 9, {"microbatches": "9"}, "more_stages_than_blocks"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_rank_starts(
    mesh: str, size: int, given: Mapping[str, str] | None, said: str | None
) -> None:
    facts, row = inspected(mesh, size, given)
    why = refusal(row, facts)
    assert (why.id if why else None) == said


def test_its_proof_has_two_rows_for_each_micro_batch() -> None:
    row = engine_facts("pipeline", 0, mesh="data=2,stage=2")
    assert demands(row).least_rows == 16
    assert demands(engine_facts("ddp", 2)).least_rows == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("whole", "chain"),
    [
        (("single", ""), (("single", ""), ("pipeline", "stage=2"), ("pipeline", "stage=2"))),
        # Replicas draw dropout's masks by themselves, and are two all the way.
        (
            ("pipeline", "stage=2,data=2"),
            (("pipeline", "stage=2,data=2"), ("pipeline", "stage=2,shard=2"), ("pipeline", "stage=2,shard=2")),
        ),
    ],
    ids=["one replica", "sharded stages"],
)
def test_a_run_goes_on_from_one_mesh_to_another(
    whole: tuple[str, str], chain: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    """With as many micro-batches on each mesh: the weights of a run that was not interrupted."""

    def run(folder: str, engine: str, mesh: str, stop_after: int | None) -> Mapping[str, Any]:
        arranged = parse_mesh(mesh)
        weights = tmp_path / folder / "weights.safetensors"
        task = RunTask(str(weights), stop_after=stop_after, check_replicas=1)
        settings = {"microbatches": 4, "stages_per_rank": 2, "schedule": "1F1B"} if engine == "pipeline" else {}
        with Ranks(arranged.size if arranged else 1) as ranks:
            ranks.work(Plan("", 0.0, HEADS, {}, engine, settings, trainings=(task,), mesh=arranged))
        return load_file(weights)

    expected = run("whole", *whole, None)
    for (engine, mesh), stop_after in zip(chain, (3, 5, 7)):
        run("chain", engine, mesh, stop_after)
    last = run("chain", *whole, None)
    for name, tensor in expected.items():
        np.testing.assert_allclose(last[name], tensor, atol=2e-5, err_msg=name)
