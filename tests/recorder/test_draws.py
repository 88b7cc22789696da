"""What a replay needs beside batches: random numbers, inputs that another model computes, calls of a closure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from samestep.message import message
from samestep.rank.hooks import Hooks
from samestep.recorder import random_numbers
from samestep.recorder.batches import Outputs
from samestep.recorder.recorder import Closures, Recorder
from samestep.recorder.replay_player import ReplayPlayer
from samestep.recorder.replay_saver import ReplayData
from samestep.records.files import read
from samestep.records.script import CLOSURES, ClosureRecord, MicroBatchRecord, StepRecord
from samestep.records.script_plan import END, KEPT, START, ReplayPlan, ReplayRecord, ScriptPlan
from samestep.records.tensor_files import write_state
from samestep.world import World

ONE, TWO = torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3) + 9


@pytest.mark.parametrize(
    ("parts", "shape", "found"),
    [
        ([ONE, TWO], (3, 3), torch.cat([ONE, TWO])),  # one for each row
        ([ONE, ONE], (4, 3), torch.cat([ONE, ONE])),
        ([ONE, ONE], (2, 3), ONE),  # the same on all ranks, for each of their batches
        ([torch.tensor(1.0)] * 2, (), torch.tensor(1.0)),
        ([ONE, ONE + 1], (2, 3), None),  # other ones for each rank's batch
        ([torch.tensor(1.0), torch.tensor(2.0)], (), None),
        ([ONE, TWO[:, :2]], (3, 3), None),
    ],
)
def test_what_ranks_have_drawn_is_joined(parts: list[Tensor], shape: tuple[int, ...], found: Tensor | None) -> None:
    joined = random_numbers.joined_draws(parts, torch.Size(shape))
    assert joined is found or (joined is not None and found is not None and torch.equal(joined, found))


@pytest.mark.parametrize(
    ("parts", "rows", "found"),
    [
        ([ONE, ONE + 1], 2, torch.cat([ONE, ONE + 1])),  # a batch that the script draws by itself
        ([ONE, ONE + 1], 4, None),  # no draw of a batch's rows
        ([ONE, ONE], 2, ONE),
        ([torch.tensor([1.0]), torch.tensor([2.0])], 1, None),  # a choice, of which one process has one
    ],
)
def test_draws_of_each_ranks_rows_are_drawn_for_all(parts: list[Tensor], rows: int, found: Tensor | None) -> None:
    joined = random_numbers.joined_draws(parts, parts[0].shape, rows=rows)
    assert joined is found or (joined is not None and found is not None and torch.equal(joined, found))


def test_what_numpy_draws_may_be_replaced(hooks: Hooks) -> None:
    def around(call: Callable[[], Tensor]) -> Tensor:
        numbers = call()
        return torch.zeros(4) if numbers.dim() else numbers.fill_(3)

    random_numbers.patch_numpy_draws(hooks, around)
    assert np.random.randint(1, 9, (2,)).tolist() == [0, 0, 0, 0]
    assert np.random.rand() == 3.0 and np.random.randint(5) == 3
    assert np.random.choice(["a"]) == "a"  # no number


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(2, 3),
        lambda: torch.rand_like(ONE),
        lambda: torch.empty(2).normal_(),
        lambda: torch.distributions.Normal(0.0, 1.0).sample((2,)),
        lambda: nn.init.normal_(torch.empty(2, 3)),
        lambda: torch.randint(0, 5, (2,), generator=torch.Generator().manual_seed(1)),
    ],
)
def test_draws_by_torchs_functions_are_seen_once(draw: Callable[[], Tensor], hooks: Hooks) -> None:
    seen: list[Tensor] = []

    def around(call: Callable[[], Tensor]) -> Tensor:
        seen.append(call())
        return seen[-1]

    random_numbers.patch_draws(hooks, around)
    found = draw()
    assert len(seen) == 1 and seen[0].shape == found.shape


def test_inputs_that_come_of_a_models_output_are_known() -> None:
    outputs, model, rows = Outputs(), nn.Linear(3, 3), torch.ones(2, 3)
    fake = model(rows)
    outputs.add((fake, {"n": 1}))
    assert (
        outputs.are_used_in(((fake,), {}))
        and outputs.are_used_in(((fake.detach(),), {}))
        and outputs.are_used_in(((2 * fake,), {}))
    )
    assert not outputs.are_used_in(((rows,), {})) and not outputs.are_used_in(((2 * fake.detach(),), {}))
    del fake
    outputs.add({})
    assert not outputs._known  # what is gone is forgotten


def test_the_calls_of_a_closure_are_in_a_file_while_they_go_on(tmp_path: Path) -> None:
    path, closures = tmp_path / CLOSURES.format(1), Closures(tmp_path, 1)
    closures.count(0, 1)
    closures.count(0, 1, done=True)
    assert not path.exists()  # one call a step says nothing
    closures.count(1, 1)
    closures.count(1, 2)
    assert read(ClosureRecord, path) == ClosureRecord([1, 2], 1)
    closures.count(1, 2, done=True)
    closures.count(2, 1)
    assert read(ClosureRecord, path) == ClosureRecord([1, 2, 1], 2)


def test_a_replay_that_ends_says_only_why(tmp_path: Path) -> None:
    """It has counted no micro-batches: their number would be called a difference."""
    found: list[ReplayRecord] = []

    class Left(Exception):
        pass

    def leave(replayed: ReplayRecord) -> NoReturn:
        found.append(replayed)
        raise Left

    torch.save(ReplayData(), tmp_path / KEPT.format(0))
    for name in (START, END):
        write_state(tmp_path, 0, name, {})
    recorder = Recorder(ScriptPlan(str(tmp_path), 0.0, "train.py"), World.from_env({}), lambda _: None)
    recorder.steps.append(StepRecord(0, [MicroBatchRecord([])], [0.1], [], [], 0, None, {}, []))
    player = ReplayPlayer(recorder, ReplayPlan(str(tmp_path), 1, str(tmp_path), [[0.1]], [1]), leave)
    with pytest.raises(Left):
        player.stop(message("replay_reads_other_rows"))
    assert (found[0].why_not, found[0].micro_batches) == (message("replay_reads_other_rows"), -1)
