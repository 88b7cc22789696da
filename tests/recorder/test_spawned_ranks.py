"""Ranks that a script starts itself, steps that one takes alone, and what is seen of gathers and 16-bit steps."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from samestep.rank import flight_recorder
from samestep.rank.hooks import Hooks
from samestep.recorder import steps_alone
from samestep.recorder.losses import cut_gathers, nodes_of, normalises_rows
from samestep.recorder.parameters import Moves
from samestep.recorder.spawned_ranks import SpawnedRanks, opens_group, with_one_rank
from samestep.recorder.steps_alone import StepsAlone
from samestep.world import World


def test_the_number_of_ranks_becomes_one_in_arguments_and_settings() -> None:
    assert with_one_rank((2, 2, "x"), 2) == (1, 2, "x")
    settings = Namespace(world_size=2, layers=2, lr=0.1)
    changed: Any = with_one_rank((settings, {"n_gpus": 2, "depth": 2}), 2)
    assert changed == (Namespace(world_size=1, layers=2, lr=0.1), {"n_gpus": 1, "depth": 2})
    assert settings.world_size == 2


def _set_up(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank)


def _train(rank: int) -> None:
    _set_up(rank)


def _read(path: str) -> str:
    return path


def test_a_function_that_opens_a_group_is_a_rank() -> None:
    assert opens_group(_train) and opens_group(partial(_train, 0))
    assert not opens_group(_read) and not opens_group(torch.nn.Linear) and not opens_group(None)


def test_the_environment_of_a_replay_has_one_rank(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script has set it for the processes that it starts, without an argument."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = []
    player: Any = SimpleNamespace(ranks=2)
    SpawnedRanks(hooks, World(0, 1), player, None)._run(lambda: found.append(os.environ["WORLD_SIZE"]), _read, 2)
    assert found == ["1"]


def test_a_gather_is_cut_where_one_part_alone_has_a_gradient() -> None:
    own, other = torch.ones(2, 3, requires_grad=True) * 2, torch.ones(2, 3)
    assert cut_gathers(torch.cat([own, other]).sum(), 2) == 1
    assert cut_gathers(torch.cat([own, own * 2]).sum(), 2) == 0
    assert cut_gathers(torch.cat([own, other, other]).sum(), 2) == 0


def test_a_loss_that_normalises_the_rows_of_a_batch_is_told_from_one_that_normalises_each_row() -> None:
    rows = torch.randn(4, 3, requires_grad=True) * 1.0
    outputs = nodes_of({"rows": rows})
    of_rows = [rows / rows.std(0), rows / rows.var(-2), rows / rows.std(), rows / rows.std((0, 1))]
    for normalised in (*of_rows, F.batch_norm(rows, None, None, training=True)):
        assert normalises_rows(normalised.pow(3).sum(), outputs)
    mean, variance = torch.zeros(3), torch.ones(3)
    of_each = [rows / rows.std(1, keepdim=True), rows / rows.var(-1, keepdim=True), F.layer_norm(rows, [3])]
    for normalised in (*of_each, F.batch_norm(rows, mean, variance)):
        assert not normalises_rows(normalised.pow(3).sum(), outputs)


def test_what_the_model_normalises_is_no_normalisation_of_the_loss() -> None:
    """Nor is what the loss does to a weight: neither is of the rows that the model has returned."""
    inputs, weight = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)
    output = inputs @ ((weight - weight.mean(0)) / weight.std(0))
    penalty = (weight.std(0) - 1).square().sum()
    assert not normalises_rows(output.square().sum() + penalty, nodes_of([output]))
    assert normalises_rows((output / output.std(0)).pow(3).sum() + penalty, nodes_of([output]))
    # Where it is not known what the model has returned, nothing is told apart.
    assert normalises_rows(output.square().sum(), set())


def test_elements_of_sixteen_bits_that_no_step_moves_are_counted() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16)
    moves = Moves(weight)
    weight.data[0] += 1
    weight.data[1] += 1e-5
    moves.after_step()
    assert (moves.still, moves.with_gradient) == (2, 3)


def test_steps_are_alone_until_the_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[Any] = []
    monkeypatch.setattr(flight_recorder, "read", lambda: entries)
    monkeypatch.setattr(steps_alone, "WAIT_S", 0.05)
    alone = StepsAlone(tmp_path, World(0, 2))
    alone.begin_forward()
    alone.end_step()
    (tmp_path / "rank0.step0.npz").touch()
    assert not alone.were_before_meeting() and alone.are_no_others()
    entries.append(SimpleNamespace(time_created_ns=time.time_ns()))
    assert alone.were_before_meeting() and not alone.are_no_others()
    alone.end(1)
    assert alone.taken == 1 and not [*tmp_path.iterdir()]
    alone.begin_forward()
    entries.append(SimpleNamespace(time_created_ns=time.time_ns()))
    alone.end_step()
    assert not alone.were_before_meeting()


def test_another_rank_that_has_taken_a_step_takes_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "read", list)
    alone = StepsAlone(tmp_path, World(0, 2))
    alone.begin_forward()
    alone.end_step()
    (tmp_path / "rank1.step0.npz").touch()
    assert not alone.are_no_others()
