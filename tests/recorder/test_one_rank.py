"""A replay on one rank computes as one process would: without the kernels for pieces of the classes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss, loss_parallel

from samestep.recorder.one_rank import leave_losses_whole


@pytest.mark.parametrize("whole", [False, True])
def test_log_softmax_has_its_gradient_under_loss_parallel(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_enable_custom_loss_ops", "_disable_custom_loss_ops"):
        monkeypatch.setattr(loss, name, getattr(loss, name))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        if whole:
            leave_losses_whole()
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
