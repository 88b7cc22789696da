"""What a step costs a rank: bytes that can be counted by hand, under engines that divide different things."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from command import TESTS
from lane_marks import CHECK
from mutations.plant import patched
from planting import FileFault
from ranks import SOURCE, Ranks
from samestep.records.costs import StepCost
from samestep.records.plan import MeasureTask, Plan
from samestep.world.mesh import parse_mesh

LAYERS = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from samestep import Job, Recipe

def job():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    rows = TensorDataset(torch.randn(64, 32), torch.randn(64, 32))
    def criterion(output, batch):
        return F.mse_loss(output, batch.targets)
    return Job(model, criterion, Recipe(torch.optim.Adam, {"lr": 1e-3}), rows, 16)
"""
FLOAT = 4  # bytes
WEIGHTS = FLOAT * (32 * 64 + 64 + 64 * 32 + 32)
STEPS = 2  # of Adam's state: four bytes for each of the parameters


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("job") / "layers.py"
    path.write_text(LAYERS)
    return str(path)


def costs(job: str, engine: str, ranks: Ranks, mesh: str = "", **settings: object) -> list[StepCost]:
    """Returns what a step costs each rank."""
    plan = Plan("", 0.0, job, {}, engine, settings, trainings=(MeasureTask(STEPS, costs=True),), mesh=parse_mesh(mesh))
    found = [training.cost for training in ranks.work(plan).training("measure")]
    assert all(found)
    return [cost for cost in found if cost]


@dataclass(frozen=True)
class Expected:
    """Of each rank, as shares of the weights' bytes. sent: along the axis."""

    parameters: float
    axis: str
    sent: float
    optimizer: float


@pytest.mark.parametrize(
    ("engine", "size", "expected"),
    [
        ("single", 1, Expected(1, "", 0, 2)),
        ("ddp", 2, Expected(1, "data", 1, 2)),  # an all-reduce of the gradients: 2 (g - 1) / g of them
        pytest.param("ddp", 3, Expected(1, "data", 4 / 3, 2), marks=CHECK),
        # Two all-gathers of the other rank's half and a reduce-scatter.
        ("fsdp", 2, Expected(1 / 2, "shard", 3 / 2, 1)),
    ],
)
@pytest.mark.parametrize("threads", [True, pytest.param(False, marks=CHECK)])
def test_memory_and_traffic_are_those_of_the_engine(
    engine: str, size: int, expected: Expected, threads: bool, layers: str
) -> None:
    with Ranks(size, threads=threads and size > 1) as ranks:
        for cost in costs(layers, engine, ranks):
            memory = cost.memory
            assert memory.parameters == memory.gradients == expected.parameters * WEIGHTS
            numbers = 4 * FLOAT  # Adam counts its steps in a number for each parameter
            assert memory.optimizer == pytest.approx(expected.optimizer * WEIGHTS, abs=numbers)
            assert cost.sent == ({expected.axis: round(expected.sent * WEIGHTS)} if expected.axis else {})
            hidden = FLOAT * 16 // size * 64  # what the rows are between the layers
            held = memory.parameters + memory.gradients + memory.optimizer
            assert hidden < memory.others < memory.total <= held + memory.others
            assert cost.bubble is None


def test_each_owner_sends_its_part_to_the_others(layers: str) -> None:
    """ZeRO: an all-reduce of the gradients, and a broadcast of the weights from the rank that has stepped them."""
    with Ranks(2, threads=True) as ranks:
        sent = [cost.sent["data"] for cost in costs(layers, "zero", ranks)]
    assert sum(sent) == 3 * WEIGHTS and sent[0] != sent[1]


def test_rows_that_a_batch_is_made_of_are_not_the_steps(tmp_path: Path) -> None:
    peaks = []
    for rows in (64, 64_000):
        path = tmp_path / f"rows{rows}.py"
        path.write_text(LAYERS.replace("torch.randn(64, 32)", f"torch.randn({rows}, 32)"))
        with Ranks(1) as ranks:
            peaks.append(costs(str(path), "single", ranks)[0].memory.total)
    assert peaks[0] == peaks[1]


BARE = """
class Bare(torch.optim.Optimizer):
    def __init__(self, params, lr):
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.state, self.defaults = {}, {"lr": lr}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
"""


def test_an_optimizer_that_cannot_be_looked_at_is_measured_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    path.write_text(LAYERS.replace("def job", f"{BARE}\ndef job").replace("torch.optim.Adam,", "Bare,"))
    plan = Plan("", 0.0, str(path), {}, "single", {}, trainings=(MeasureTask(STEPS, costs=True),))
    with Ranks(1) as ranks:
        (training,) = ranks.work(plan).training("measure")
    assert training.cost is None and len(training.step_s) == STEPS


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2, threads=True) as ranks:
        yield ranks


@pytest.mark.check
@pytest.mark.parametrize(
    ("engine", "mesh"),
    [("tensor", "tensor=2"), ("pipeline", "stage=2"), ("context", "sequence=2"), ("expert", "expert=2")],
)
def test_threads_cost_what_processes_do(engine: str, mesh: str, two_ranks: Ranks) -> None:
    name = {"context": "sequences", "expert": "experts"}.get(engine, "heads")
    settings = {"pipeline": {"microbatches": 2, "stages_per_rank": 2, "schedule": "1F1B"}, "context": {"how": "gather"}}
    job = f"{TESTS}/mutations/jobs.py:{name}"
    as_threads = costs(job, engine, two_ranks, mesh, **settings.get(engine, {}))
    with Ranks(2) as ranks:
        as_processes = costs(job, engine, ranks, mesh, **settings.get(engine, {}))
    assert [cost.sent for cost in as_threads] == [cost.sent for cost in as_processes]
    assert all({*cost.sent} == {mesh.partition("=")[0]} for cost in as_threads)
    for thread, process in zip(as_threads, as_processes):
        assert thread.memory.parameters == process.memory.parameters
        assert thread.memory.gradients == process.memory.gradients
        assert thread.memory.optimizer == process.memory.optimizer
    if engine == "pipeline":
        assert all(0 < (cost.bubble or 0) < 1 for cost in as_processes)


@pytest.mark.check
def test_a_loop_that_reduces_once_more_sends_more(tmp_path: Path, layers: str) -> None:
    step = "                optimizer.step(*run.closure(backward))\n"
    loop = "                for p in module.parameters():\n"
    again = f"{loop}                    dist.all_reduce(p.grad, dist.ReduceOp.MAX)\n"
    fault = FileFault("reduces again", "engines/ddp.py", step, again + step)
    sent = []
    for source in (SOURCE, patched(fault, tmp_path)):
        with Ranks(2, source) as ranks:
            sent.append(costs(layers, "ddp", ranks)[0].sent["data"])
    assert sent[1] == 2 * sent[0]
