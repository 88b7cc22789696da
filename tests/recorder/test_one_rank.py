"""A replay on one rank computes as one process would: without the kernels for pieces of the classes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from samestep.rank.hooks import Hooks
from samestep.recorder.one_rank import GatheredWithHistory, leave_losses_whole


@pytest.mark.parametrize("whole", [False, True])
def test_log_softmax_has_its_gradient_under_loss_parallel(whole: bool, hooks: Hooks) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        if whole:
            leave_losses_whole(hooks)
        values, weights = torch.randn(4, 6), torch.rand(4, 6)
        plain = values.clone().requires_grad_()
        (torch.log_softmax(plain, -1) * weights).sum().backward()
        divided = distribute_tensor(values, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            found = torch.log_softmax(divided, -1) * distribute_tensor(weights, mesh, [Shard(1)])
            found.sum().backward()
        assert torch.allclose(divided.grad.full_tensor(), plain.grad) == whole
    finally:
        dist.destroy_process_group()


@pytest.fixture
def gathered(hooks: Hooks) -> Iterator[GatheredWithHistory]:
    """A group of one rank, whose collectives hand out what they gather with its history."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    patched = GatheredWithHistory()
    patched.attach(hooks)
    try:
        yield patched
    finally:
        dist.destroy_process_group()


def test_what_the_only_rank_gathers_has_its_history(gathered: GatheredWithHistory) -> None:
    weight = torch.randn(4, requires_grad=True)
    parts = [torch.empty(4)]
    dist.all_gather(parts, weight * 2)
    assert torch.cat(parts).numpy().shape == (4,)  # which on several ranks has none
    (torch.cat(parts) * torch.arange(4.0)).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, 2 * torch.arange(4.0))
    assert gathered.kept == 1


def test_a_buffer_that_each_step_gathers_into_begins_anew(gathered: GatheredWithHistory) -> None:
    weight, buffer = torch.randn(4, requires_grad=True), torch.zeros(4)
    for _ in range(2):
        weight.grad = None
        dist.all_gather([buffer], weight * 3)
        buffer.sum().backward()
        assert weight.grad is not None and torch.equal(weight.grad, torch.full((4,), 3.0))


def test_what_is_meant_to_have_no_gradient_has_none(gathered: GatheredWithHistory) -> None:
    weight, parts = torch.randn(4, requires_grad=True), [torch.empty(4)]
    dist.all_gather(parts, (weight * 2).detach())
    assert not parts[0].requires_grad
    with torch.no_grad():
        dist.all_gather(parts, weight * 2)
    assert not parts[0].requires_grad and gathered.kept == 0
    own = weight * 2
    dist.all_gather(parts, own)
    parts[0] = own  # as many scripts put their own part in
    parts[0].sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((4,), 2.0))
