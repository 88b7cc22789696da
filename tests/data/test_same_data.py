"""A job that comes out differently on the ranks is not trained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from budget import deadline
from command import samestep
from said import refuses, tells
from samestep import Job
from samestep.data.fingerprint import check_same_data
from samestep.message import message
from samestep.testing import ranks
from samestep.world import World

TESTS = Path(__file__).parents[1]
JOBS_DIFFER = message("jobs_must_be_the_same")
TRAINING, EVALUATION = message("training_goes_on"), message("evaluation_goes_on")
JOBS = """
import os, torch
from dataclasses import replace
from torch.utils.data import IterableDataset, TensorDataset
from samestep import Job, Stream
from conformance import jobs_drawn
from samestep import Weighted

class Random(TensorDataset):
    def __getitem__(self, index):
        inputs, weight, target = super().__getitem__(index)
        return inputs + torch.rand(()), weight, target

class Opened(TensorDataset):
    opened = None  # as of a file that is opened when it is first read
    def __getitem__(self, index):
        self.opened = self.opened or os.getpid()
        assert self.opened == os.getpid(), "this process reads through what another has opened"
        return super().__getitem__(index)

class Split(IterableDataset):
    def __init__(self, rows, by_rank):
        self.rows, self.by_rank = rows, by_rank
    def __iter__(self):  # as webdataset's split_by_node
        rank, size = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
        return iter([*self.rows][rank::size] if self.by_rank else [*self.rows])

def job(how: str = ""):
    drawn = jobs_drawn.job(rows=24)
    rank = int(os.environ.get("RANK", 0))
    inputs, weights, targets = drawn.train.tensors
    if how == "values":
        inputs = inputs + rank
    if how == "order":
        generator = torch.Generator().manual_seed(rank)
        inputs = inputs[torch.randperm(24, generator=generator)]
    if how == "length":
        inputs, weights, targets = inputs[rank:], weights[rank:], targets[rank:]
    if how == "evaluation":
        of_rank = [tensor[rank:] for tensor in drawn.evaluation.tensors]
        return replace(drawn, evaluation=TensorDataset(*of_rank))
    if how == "weights":
        drawn = replace(drawn, order=Weighted([1.0 + rank * row for row in range(24)]))
    if how in ("split", "whole"):
        rows = TensorDataset(inputs, weights, targets)
        return replace(drawn, train=Stream(Split(rows, how == "split"), length=24), shuffle=False)
    kind = {"random": Random, "opened": Opened}.get(how, TensorDataset)
    return replace(drawn, train=kind(inputs, weights, targets), workers=2 * (how == "opened"))
"""


def built(how: str) -> Job:
    """The job of JOBS, as a rank builds it."""
    names: dict[str, object] = {}
    exec(JOBS, names)
    job: Job = names["job"](how)  # type: ignore[operator]
    return job


def run(tmp_path: Path, how: str, *words: str, nproc: int = 2) -> tuple[int, str]:
    (tmp_path / "jobs.py").write_text(JOBS)
    asked = [f"{tmp_path}/jobs.py", "--nproc", str(nproc), "--set", f"how={how}", *deadline(), "--json"]
    found = samestep(*(words or ("run", "--engine", "ddp", "--out", f"{tmp_path}/out")), *asked)
    return found.returncode, found.stderr + (json.dumps(json.loads(found.stdout)) if found.stdout else "")


@ranks(2)
@pytest.mark.parametrize(
    ("how", "identity", "fields"),
    [
        ("order", "rank_reads_other_values", {"dataset": TRAINING, "hint": JOBS_DIFFER}),
        ("length", "rank_has_other_samples", {"dataset": TRAINING, "samples": 23, "first": 24, "hint": JOBS_DIFFER}),
        ("split", "rank_reads_other_values", {"dataset": TRAINING, "hint": message("streams_must_be_the_same")}),
        ("evaluation", "rank_has_other_samples", {"dataset": EVALUATION, "hint": JOBS_DIFFER}),
        ("weights", "rank_has_another_order", {}),
    ],
)
def test_other_data_on_a_rank_is_refused_on_all(how: str, identity: str, fields: dict[str, Any]) -> None:
    with refuses(identity, rank=1, **fields):
        check_same_data(built(how), World.from_env(os.environ))


@ranks(2)
@pytest.mark.parametrize("how", ["", "random", "whole"])
def test_the_same_data_and_samples_that_are_random_say_nothing(how: str) -> None:
    check_same_data(built(how), World.from_env(os.environ))


def test_a_training_on_other_data_is_refused(tmp_path: Path) -> None:
    code, said = run(tmp_path, "values")
    named = {"rank": 1, "dataset": TRAINING, "sample": 0, "hint": JOBS_DIFFER}
    assert (code, tells(said, "rank_reads_other_values", **named)) == (2, True), said


def test_an_evaluation_of_other_data_on_a_rank_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "evaluation", nproc=1)[0] == 0
    weights = str(tmp_path / "out" / "weights.safetensors")
    code, said = run(tmp_path, "evaluation", "evaluate", "--weights", weights, "--out", f"{tmp_path}/score")
    named = {"rank": 1, "dataset": EVALUATION, "samples": 12, "first": 13, "hint": JOBS_DIFFER}
    assert code == 2 and tells(said, "rank_has_other_samples", **named), said


def test_looking_leaves_a_file_closed_that_loader_workers_will_open(tmp_path: Path) -> None:
    code, said = run(tmp_path, "opened")
    assert code == 0, said
