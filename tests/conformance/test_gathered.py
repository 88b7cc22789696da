"""Job(gather_outputs=True): the criterion sees all ranks' rows, and N ranks take the step of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance import jobs_gathered
from conformance.table import EXACT
from lane_marks import in_turn, on_engines
from mutations.plant import patched
from planting import FileFault
from ranks import Ranks, RanksFailed, proof_plan, prove, reference_plan, skip_unless_here
from said import said_by_ranks, says
from samestep import reference
from samestep.engine import Layout
from samestep.errors import UserError
from samestep.job import Job
from samestep.proof.trace import Expectation

JOBS = f"{Path(__file__).parent}/jobs_gathered.py"
NAMES = ("clip", "supervised_contrastive", "balanced_experts")
FAST = {("clip", "ddp", 2), ("supervised_contrastive", "ddp", 2), ("balanced_experts", "fsdp", 2)}
ENGINES = EXACT


def sizes_of(engine: str) -> tuple[int, ...]:
    return (2, 3) if engine in ("ddp", "fsdp") else (2,)


CASES = on_engines(NAMES, ENGINES, sizes_of, FAST)


@pytest.mark.parametrize(("name", "engine", "size"), CASES)
def test_ranks_take_the_references_step(
    name: str, engine: str, size: int, ranks: Callable[..., Ranks], reference_rank: Ranks
) -> None:
    skip_unless_here(engine, size)
    verdict = prove(reference_rank, ranks(size, engine), f"{JOBS}:{name}", engine)
    assert verdict.verdict == "same", verdict


GATHER = "rank/step.py"
FAULTS = [
    ("clip", "ranks not multiplied", "training.py", "share = float(self.world.replicas)", "share = 1.0", "differs"),
    (
        "clip",
        "no graph of its own",
        GATHER,
        "parts[world.rank] = _tensor(rank_leaves[n])",
        "parts[world.rank].sum()",
        "torch",
    ),
    ("clip", "temperature not shared out", GATHER, "averaged = [not by_row[n] and", "averaged = [False and", "differs"),
    (
        "supervised_contrastive",
        "outputs in another order than the rows",
        GATHER,
        "leaves[n] = torch.cat(parts)",
        "leaves[n] = torch.cat(parts[::-1] if n < of_output else parts)",
        "differs",
    ),
    (
        "supervised_contrastive",
        "rows of a rank that has none",
        GATHER,
        "rows=micro_batch.rows,",
        "rows=len(micro_batch.indices),",
        "the criterion",
    ),
]


@pytest.mark.parametrize(
    ("job", "name", "file", "old", "new", "expected"),
    [pytest.param(*f, marks=in_turn(4, n) if n else (), id=f[1]) for n, f in enumerate(FAULTS)],
)
def test_a_planted_fault_is_caught(
    job: str, name: str, file: str, old: str, new: str, expected: str, reference_rank: Ranks, tmp_path: Path
) -> None:
    source = patched(FileFault(name, file, old, new), tmp_path)
    with Ranks(2, source) as own:
        try:
            caught = prove(reference_rank, own, f"{JOBS}:{job}", "ddp").verdict
        except RanksFailed as error:  # torch, or an assertion of the job's criterion, refuses what the fault makes
            refused = {"does not require grad": "torch", "AssertionError": "the criterion"}
            caught = next((by for words, by in refused.items() if words in str(error)), str(error))
    assert caught == expected


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(UserError, match=r"same size; pad.*collate"):
        reference.play(jobs_gathered.padded(), Layout(2), 1)
    with pytest.raises(UserError, match="with one of"):
        reference.play(replace(jobs_gathered.clip(), sync_batchnorm=True), Layout(2), 1)


@pytest.mark.check
def test_and_by_the_ranks_too(reference_rank: Ranks) -> None:
    """What the reference has of another job only tells the dtype and the rate."""
    other = Expectation(reference_rank.work(reference_plan(f"{JOBS}:clip", 2)), 0)
    with Ranks(2) as own, pytest.raises(RanksFailed) as failed:
        own.work(proof_plan(other, f"{JOBS}:padded", "ddp", 2))
    says(said_by_ranks(str(failed.value), "Refused"), "gathered_outputs_have_different_shapes", rank=1)


def without_dropout(name: str) -> Job:
    job: Job = getattr(jobs_gathered, name)()

    def model() -> torch.nn.Module:
        built = job.model().double()
        for module in built.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return built

    inputs, targets = job.train.tensors  # type: ignore[attr-defined]
    return replace(job, model=model, train=torch.utils.data.TensorDataset(inputs.double(), targets))


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_of_three_ranks_is_plain_training(name: str) -> None:
    job = without_dropout(name)
    one, three, apart = (
        reference.play(each, Layout(replicas), 7)
        for each, replicas in ((job, 1), (job, 3), (replace(job, gather_outputs=False), 3))
    )
    differs = [max(float((one.state[n] - p.state[n]).abs().max()) for n in one.state) for p in (three, apart)]
    assert differs[0] < 1e-13 < 1e-4 < differs[1]
