"""Job(carry_state=True): each row continues that of the step before, and N ranks take the steps of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from conformance import jobs_carried
from conformance.table import EXACT
from lane_marks import in_turn, on_engines
from mutations.plant import patched
from planting import FileFault
from ranks import Ranks, RanksFailed, prove, skip_unless_here
from samestep import ByLength, Job, UserError, Windows, reference
from samestep.data.schedule import schedule_of
from samestep.engine import Layout
from samestep.records.plan import ProveTask
from samestep.tasks.proof_job import proof_job

JOBS = f"{Path(__file__).parent}/jobs_carried.py"
NAMES = ("lstm", "accumulated", "few")
ENGINES = (*EXACT, "single", "split")


def sizes_of(engine: str) -> tuple[int, ...]:
    return (1,) if engine in ("single", "split") else (2, 3) if engine in ("ddp", "fsdp") else (3,)


CASES = on_engines(NAMES, ENGINES, sizes_of, {("accumulated", "ddp", 2)})


@pytest.mark.parametrize(("name", "engine", "size"), CASES)
def test_ranks_take_the_references_step(
    name: str, engine: str, size: int, ranks: Callable[..., Ranks], reference_rank: Ranks
) -> None:
    skip_unless_here(engine, size)
    verdict = prove(reference_rank, ranks(size, engine), f"{JOBS}:{name}", engine)
    assert verdict.verdict == "same", verdict


CARRY = "rank/step.py"
FAULTS = [
    ("wrong micro-batch", CARRY, "self._of_micro.get(batch.micro_batch.micro)", "self._of_micro.get(0)", "loss"),
    ("not reset", CARRY, "if batch.micro_batch.epoch != self._epoch:", "if self._epoch < 0:", "loss"),
    ("lost", CARRY, "self._of_micro[batch.micro_batch.micro] = detached(state)", "pass", "loss"),
    ("rows, not lanes", "data/schedule.py", "lanes.T.reshape(-1)", "lanes.reshape(-1)", "order"),
    ("with its graph", CARRY, "= detached(state)", "= state", "backward through the graph a second time"),
]


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "named"),
    [pytest.param(*f, marks=in_turn(4, n) if n else (), id=f[0]) for n, f in enumerate(FAULTS)],
)
def test_a_planted_fault_is_caught(
    name: str, file: str, old: str, new: str, named: str, reference_rank: Ranks, tmp_path: Path
) -> None:
    source = patched(FileFault(name, file, old, new), tmp_path)
    with Ranks(2, source) as own:
        try:
            verdict = prove(reference_rank, own, f"{JOBS}:accumulated", "ddp")
            caught = str(verdict) if verdict.verdict == "differs" else ""
        except RanksFailed as error:
            caught = str(error)
    assert named in caught


def batchify(text: torch.Tensor, lanes: int) -> torch.Tensor:
    """As in pytorch/examples/word_language_model: of shape [tokens, lanes]."""
    steps = text.size(0) // lanes
    return text.narrow(0, 0, steps * lanes).view(lanes, -1).t().contiguous()


def test_it_is_the_loop_of_the_word_language_model() -> None:
    """Two epochs in the example's own words, in one process."""
    lanes, length, epochs = 5, jobs_carried.LENGTH, 2
    text = jobs_carried.TEXT[:321]  # 80 windows and their last target: 16 in each of 5 lanes
    job = replace(double(jobs_carried.lstm()), train=Windows(text, length), global_batch=lanes, evaluation=None)
    job = replace(job, epochs=epochs)
    model = job.model()
    optimizer = job.optimizer.build(model)
    inputs, targets = batchify(text[:-1], lanes), batchify(text[1:], lanes)
    for _ in range(epochs):
        hidden: Any = None
        for at in range(0, inputs.size(0), length):
            hidden = tuple(state.detach() for state in hidden) if hidden else None
            output, hidden = model(inputs[at : at + length].t(), hidden)
            optimizer.zero_grad()
            F.cross_entropy(output.flatten(0, 1), targets[at : at + length].t().flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    assert schedule_of(job, 1).steps_per_epoch == 16
    for replicas in (1, 2):
        state = reference.play(job, Layout(replicas), 16 * epochs).state
        assert max(float((state[n] - t).abs().max()) for n, t in model.state_dict().items()) < 1e-12


def double(job: Job) -> Job:
    return replace(job, model=lambda: job.model().double())


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_of_three_ranks_is_plain_training(name: str) -> None:
    job = double(getattr(jobs_carried, name)())
    one, three = (reference.play(job, Layout(replicas), 8) for replicas in (1, 3))
    lost = replace(job, forward=lambda model, batch: model(batch.inputs, None))
    apart = reference.play(lost, Layout(1), 8)
    differs = [max(float((one.state[n] - p.state[n]).abs().max()) for n in one.state) for p in (three, apart)]
    assert differs[0] < 1e-12 < 1e-4 < differs[1]


@pytest.mark.parametrize(("rows", "steps"), [(0, 8), (3, 8), (0, 4), (0, 1)])
def test_the_lanes_of_a_proof_are_contiguous(rows: int, steps: int) -> None:
    numbers = torch.arange(61)
    job = replace(jobs_carried.lstm(), train=TensorDataset(numbers, numbers))
    small = proof_job(job, ProveTask("sgd", steps, "float64", 3, 0.05, rows=rows))
    schedule = schedule_of(small, 1)
    assert schedule.steps_per_epoch >= 2 and schedule.global_batch == (rows or job.global_batch)
    ((first,), (second,)) = (schedule.step(0, 0, number) for number in (0, 1))
    numbered: Any = small.train
    assert torch.equal(numbered.tensors[0][second.indices], numbered.tensors[0][first.indices] + 1)


WRONG: dict[str, Callable[[Job], Job]] = {
    r"write forward=lambda model, batch: model\(batch.inputs, batch.state\)": lambda job: replace(
        job, forward=Job.__dataclass_fields__["forward"].default
    ),
    r"this job's rows are shuffled; give Job\(order=Lanes\(\)\)": lambda job: replace(job, order=None),
    "rows are shuffled": lambda job: replace(job, order=ByLength([1.0] * len(job.train))),
    "the rows of an incomplete last step continue none": lambda job: replace(job, last="keep"),
    "takes sync_batchnorm or carry_state, not both": lambda job: reference.play(  # type: ignore[dict-item,return-value]
        replace(job, sync_batchnorm=True), Layout(2), 1
    ),
    r"forward returned an instance of Tensor, not a pair \(output, state\)": lambda job: reference.play(  # type: ignore[dict-item,return-value]
        replace(job, forward=lambda model, batch: model(batch.inputs, None)[0]), Layout(1), 1
    ),
}


@pytest.mark.parametrize("says", WRONG)
def test_what_cannot_carry_is_refused(says: str) -> None:
    with pytest.raises(UserError, match=says):
        WRONG[says](jobs_carried.lstm())


def test_a_dataset_in_lanes_needs_no_order() -> None:
    assert replace(jobs_carried.lstm(), order=None, shuffle=False).carry_state
