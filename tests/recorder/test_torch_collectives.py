"""The table of torch's collectives knows each of this torch, by the names of its arguments, and each is observed."""

from __future__ import annotations

import inspect
import re
from types import FunctionType

import pytest
import torch
import torch.distributed as dist

from samestep.rank.hooks import Hooks
from samestep.recorder.one_rank import GatheredWithHistory
from samestep.recorder.patches import patch_gathers
from samestep.records.torch_collectives import TO_ALL, TORCH_COLLECTIVES, exchanges_parts, returns_without_history

TOLD = re.compile(r"(all_)?(gather|reduce|scatter|to_all|broadcast|barrier|i?send|i?recv)|\w+_(barrier|irecv)")


def test_the_table_has_every_function_of_this_torch() -> None:
    found = {name for name, value in vars(dist).items() if TOLD.match(name) and type(value) is FunctionType}
    assert found <= {function.name for function in TORCH_COLLECTIVES}
    for function in (function for function in TORCH_COLLECTIVES if function.name in found):  # of other versions, too
        arguments = inspect.signature(getattr(dist, function.name)).parameters
        assert {function.sent, function.received} - {""} <= {*arguments}, function.name


def test_each_gather_is_observed_and_keeps_its_history(hooks: Hooks) -> None:
    """torch renames its functions: scripts that were written for either name are observed alike."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = []
    patch_gathers(hooks, before.append)
    GatheredWithHistory().attach(hooks)
    try:
        gathers = [function.name for function in TO_ALL if function.kind == "gather" and function.takes == "tensors"]
        gathers = [name for name in gathers if hasattr(dist, name)]
        for number, name in enumerate(gathers, 1):
            weight, received = torch.randn(4, requires_grad=True), torch.empty(4)
            getattr(dist, name)([received] if name == "all_gather" else received, weight * 2)
            received.sum().backward()
            assert torch.equal(weight.grad, torch.full((4,), 2.0)) and len(before) == number  # type: ignore[arg-type]
        assert "all_gather_into_tensor" in gathers
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "exchanges", "has_no_history"),
    [
        ("all_to_all_single", True, True),
        ("all_to_all_single_autograd", True, False),
        ("all_gather_tensor", False, True),
        ("all_gather_tensor_autograd", False, False),
        ("reduce_scatter_single", False, True),
        ("irecv", True, False),
        ("all_reduce", False, False),
    ],
)
def test_what_a_recorded_operation_does(name: str, exchanges: bool, has_no_history: bool) -> None:
    assert (exchanges_parts(name), returns_without_history(name)) == (exchanges, has_no_history)
