"""The arguments of ranks that a script starts itself, and which functions are ranks."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from samestep.recorder.losses import cut_gathers
from samestep.recorder.own_ranks import opens_group, with_one_rank
from samestep.recorder.parameters import Moves


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


def test_a_gather_is_cut_where_one_part_alone_has_a_gradient() -> None:
    own, other = torch.ones(2, 3, requires_grad=True) * 2, torch.ones(2, 3)
    assert cut_gathers(torch.cat([own, other]).sum(), 2) == 1
    assert cut_gathers(torch.cat([own, own * 2]).sum(), 2) == 0
    assert cut_gathers(torch.cat([own, other, other]).sum(), 2) == 0


def test_elements_of_sixteen_bits_that_no_step_moves_are_counted() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.bfloat16)
    moves = Moves(weight)
    weight.data[0] += 1
    weight.data[1] += 1e-5
    moves.after_step()
    assert (moves.still, moves.with_gradient) == (2, 3)
