"""Engine expert: the step of one process on every mesh; checkpoints from one mesh to another; what is refused before
any rank starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from samestep.records.plan import Plan, RunTask
from samestep.world.mesh import parse_mesh

EXPERTS, HEADS, BRANCHING = (f"{TESTS}/mutations/jobs.py:{name}" for name in ("experts", "heads", "branching"))


@pytest.fixture(scope="module")
def reference_rank() -> Iterator[Ranks]:
    with Ranks(1) as rank:
        yield rank


@pytest.mark.parametrize(
    ("mesh", "complete"),
    [
        ("data=2,expert=2", False),
        pytest.param("expert=2", True, marks=CHECK),
        pytest.param("expert=4", False, marks=FULL),
        pytest.param("data=3,expert=2", True, marks=FULL),
        pytest.param("data=2", False, marks=FULL),
    ],
)
def test_it_takes_the_step_of_one_process(mesh: str, complete: bool, reference_rank: Ranks) -> None:
    facts = engine_facts("expert", 0, mesh=mesh)
    assert facts.mesh and facts.layout
    with Ranks(facts.mesh.size, threads=True) as ranks:
        verdict = prove(reference_rank, ranks, EXPERTS, "expert", complete=complete, mesh=mesh)
    assert verdict.verdict == "same", verdict
    assert facts.layout.replicas == facts.mesh.size


@pytest.mark.check
def test_experts_of_which_a_rank_calls_none_are_trained_by_the_others(reference_rank: Ranks) -> None:
    with Ranks(2, threads=True) as ranks:
        verdict = prove(reference_rank, ranks, BRANCHING, "expert")
    assert verdict.verdict == "same", verdict


@pytest.mark.parametrize(
    ("job", "size", "said"),
    [(EXPERTS, 2, None), (EXPERTS, 3, "experts_do_not_divide"), (HEADS, 2, "model_without_experts")],
)
def test_what_does_not_divide_is_refused_before_any_rank_starts(job: str, size: int, said: str | None) -> None:
    row = engine_facts("expert", size)
    facts = inspected_job(job, {}, size, engines=demands(row))
    why = refusal(row, facts)
    assert (why.id if why else None) == said


@pytest.mark.full
def test_a_run_goes_on_from_one_mesh_to_another(tmp_path: Path) -> None:
    """One process, then two ranks that have two experts each, then four, then one process: the weights of one that was
    not interrupted."""

    def run(folder: str, engine: str, mesh: str, stop_after: int | None) -> Mapping[str, Any]:
        arranged = parse_mesh(mesh)
        weights = tmp_path / folder / "weights.safetensors"
        task = RunTask(str(weights), stop_after=stop_after, check_replicas=1)
        with Ranks(arranged.size if arranged else 1) as ranks:
            ranks.work(Plan("", 0.0, EXPERTS, {"noise": "false"}, engine, trainings=(task,), mesh=arranged))
        return load_file(weights)

    whole = run("whole", "single", "", None)
    for engine, mesh, stop_after in (("single", "", 3), ("expert", "expert=2", 5), ("expert", "data=2,expert=2", 7)):
        run("chain", engine, mesh, stop_after)
    last = run("chain", "single", "", None)
    for name, tensor in whole.items():
        np.testing.assert_allclose(last[name], tensor, atol=2e-5, err_msg=name)
