"""`samestep check` of scripts that divide their model by DTensor: the healthy twins, and some of their faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lane_marks import in_turn
from recorder.plant import checked

sys.path.insert(0, str(Path(__file__).parents[1] / "twins"))

from corpus.faults.layouts import FAULTS
from corpus.healthy import ranks_of
from corpus.twin import Fault, Healthy, text_of

HEALTHY = [
    Healthy("tensor_parallel", "--sequence-parallel --loss-parallel"),
    Healthy("fsdp_tensor", "--dropout 0.1"),
    Healthy("hybrid_shards", "--clip 0.1"),
    Healthy("transformers_plan", "--model qwen3_moe"),
    Healthy("transformers_plan", "--config --fsdp 2"),
]
NAMED = ["replica_draws_apart", "replica_gradient_apart", "clipped_by_local_norms", "reduced_along_some_axes"]
NAMED += ["replica_is_no_one_process", "replica_begins_apart", "replica_reads_other_rows"]
PLANTED = [next(fault for fault in FAULTS if fault.kind == kind) for kind in NAMED]
PLANTED += [fault for fault in FAULTS if fault.script == "transformers_plan" and "--config" in fault.arguments]


@pytest.mark.parametrize(
    "twin",
    [
        pytest.param(twin, id=twin.name, marks=() if "sequence" in twin.name else in_turn(2, n))
        for n, twin in enumerate(HEALTHY)
    ],
)
def test_a_healthy_layout_is_right(twin: Healthy, tmp_path: Path) -> None:
    ranks = ranks_of(twin)
    results = checked(text_of(twin), tmp_path, script_arguments=twin.arguments.split(), nproc=ranks)
    assert results.answer == "right", results.findings
    assert all(finding.answer != "warning" for finding in results.findings)
    assert any(note.id == "layout_of_ranks" for note in results.notes)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=in_turn(4, n)) for n, fault in enumerate(PLANTED)]
)
def test_a_fault_of_a_layout_is_named(fault: Fault, tmp_path: Path) -> None:
    ranks = ranks_of(fault)
    results = checked(text_of(fault), tmp_path, script_arguments=fault.arguments.split(), nproc=ranks)
    # Where the first module that computes something else is known, it is told instead.
    told = {fault.kind, "module_computes_otherwise"} if fault.kind == "replica_is_no_one_process" else {fault.kind}
    assert told & {finding.message.id for finding in results.findings}, results.findings
    assert results.answer == "differs"


WHOLE_RANKS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
world, tp = dist.get_world_size(), 2
assert world % tp == 0, "the ranks are a whole number of replicas"
mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    torch.manual_seed(step)
    loss = model(torch.randn(6, 8)).square().mean() * FACTOR
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.check
@pytest.mark.parametrize(("factor", "answer"), [("1.0", "right"), ("world", "unknown")])
def test_a_script_that_cannot_run_as_one_rank_is_told_of_two_numbers(factor: str, answer: str, tmp_path: Path) -> None:
    """What depends on the number of ranks is another with the second one."""
    results = checked(WHOLE_RANKS.replace("FACTOR", factor), tmp_path, "--steps", "4")
    assert results.answer == answer, results.findings
    assert {f.answer for f in results.findings if f.question == "replayed gradient"} == {answer}
