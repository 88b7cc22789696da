"""Datasets that draw from the global generators: the same training on any number of ranks and loader workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance import jobs_random
from conformance.table import EXACT
from lane_marks import in_turn
from ranks import Ranks, RanksFailed, prove, skip_unless_here
from samestep import Job
from samestep.data.loader import KeyedRandom, Rows, batches
from samestep.data.schedule import schedule_of
from samestep.world import World

RANDOM = f"{Path(__file__).parent}/jobs_random.py:job"
SETTINGS: dict[str, dict[str, str]] = {
    "rows": {},
    "batched, workers": {"kind": "batched", "workers": "2"},
    "stream": {"kind": "stream"},
    "stateful stream": {"kind": "stateful"},
    "augment": {"augments": "true", "of": "torch"},
}
ENGINES = [name for name in EXACT if name != "ddp"]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_a_dataset_draws_is_proven(
    settings: dict[str, str], ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    verdict = prove(reference_rank, ranks(2), RANDOM, "ddp", settings)
    assert verdict.verdict == "same", verdict


def test_what_collate_draws_is_proven(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(3), RANDOM, "ddp", {"mixes": "true"})
    assert verdict.verdict == "same", verdict


@pytest.mark.parametrize("engine", [pytest.param(name, marks=in_turn(4, n)) for n, name in enumerate(ENGINES)])
def test_what_a_dataset_draws_is_proven_on_every_engine(
    engine: str, ranks: Callable[..., Ranks], reference_rank: Ranks
) -> None:
    skip_unless_here(engine)
    verdict = prove(reference_rank, ranks(2, engine), RANDOM, engine)
    assert verdict.verdict == "same", verdict


def test_without_the_keys_the_proof_says_differs(
    ranks: Callable[[int], Ranks], reference_rank: Ranks, tmp_path: Path
) -> None:
    """The same fault as a loader that forgets to key: a dataset that draws from a generator of its own."""
    file = tmp_path / "own_generator.py"
    file.write_text(
        "import numpy as np\nfrom conformance.jobs_random import Transformed, job as usual\n"
        "from dataclasses import replace\nown = np.random.default_rng()\n"
        "class Own(Transformed):\n"
        "    def __getitem__(self, index):\n"
        "        row, target = super().__getitem__(index)\n        return row * own.normal(), target\n"
        "def job():\n    return replace(usual(), train=Own(0, 44, ''))\n"
    )
    with Ranks(1) as rank, pytest.raises(RanksFailed, match="sample_differs_when_read_again"):
        prove(rank, ranks(2), f"{file}:job", "ddp")


def test_a_stream_that_goes_on_where_it_was_left_is_told_so(ranks: Callable[[int], Ranks]) -> None:
    with Ranks(1) as rank, pytest.raises(RanksFailed, match="stream_differs_when_read_again"):
        prove(rank, ranks(2), RANDOM, "ddp", {"kind": "goes on"})


def _read(job: Job, size: int) -> dict[int, torch.Tensor]:
    """sample index -> its inputs, in the first epoch on `size` ranks."""
    schedule = schedule_of(job, size)
    seen = [b for rank in range(size) for b in batches(job, World(rank, size), schedule, schedule.steps_per_epoch)]
    return {i: row for b in seen for i, row in zip(b.micro_batch.indices.tolist(), b.inputs) if b.micro_batch.rows}


@pytest.mark.parametrize("of", ["torch", "numpy", "python"])
def test_a_sample_is_the_same_on_any_number_of_ranks(of: str) -> None:
    one, three = (_read(jobs_random.job(of), size) for size in (1, 3))
    assert {*one} == {*three} == {*range(44)}
    assert all(torch.equal(one[index], three[index]) for index in one)
    assert len({tuple(row.tolist()) for row in one.values()}) == 44
    schedule = schedule_of(jobs_random.job(of), 1)
    rows = Rows(jobs_random.job(of))
    again = [rows[schedule.step(0, epoch, 0)[0]][1][0] for epoch in (0, 1)]
    assert not torch.equal(*again)


def test_the_generators_are_restored() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[union-attr]
    _read(jobs_random.job(), 1)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_only_what_is_drawn_from_is_keyed() -> None:
    for of, names in (("torch", {"torch"}), ("python numpy", {"random", "numpy"}), ("", set())):
        rows = Rows(jobs_random.job(of))
        rows[schedule_of(jobs_random.job(of), 1).step(0, 0, 0)[0]]
        assert rows.keyed.drawn == names


def test_a_draw_is_keyed_from_the_first_on_however_late() -> None:
    """A dataset may begin to draw in its second epoch."""
    for began in (1, 5, 13):
        keyed, drawn = KeyedRandom(), []

        def read(batch: int, keyed: KeyedRandom = keyed, began: int = began) -> float:
            keyed.seed(7, batch)
            return random.random() if batch >= began else 0.0

        for batch in range(20):
            drawn.append(keyed(lambda batch=batch, read=read: read(batch)))
        assert keyed.drawn == {"random"}
        again = KeyedRandom()
        again.drawn = frozenset({"random"})
        assert drawn == [again(lambda batch=batch, read=read, keyed=again: read(batch, keyed)) for batch in range(20)]
