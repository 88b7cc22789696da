"""`samestep check` of plain parameters beside those that FSDP2 shards: they are a rank's own, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from recorder.plant import checked

REFERENCE = """import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
policy, reference = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
reference.load_state_dict(policy.state_dict())
reference.requires_grad_(False)
for model in (policy, reference):
    fully_shard(model)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(rows, rows[:, :4].argmax(1))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=4, sampler=sampler):
        with torch.no_grad():
            near = reference(x).log_softmax(-1)
        output = policy(x)
        apart = F.kl_div(output.log_softmax(-1), near, log_target=True, reduction="batchmean")
        (F.cross_entropy(output, y) + 0.1 * apart).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.check
def test_a_frozen_sharded_reference_is_no_weight_that_begins_apart(tmp_path: Path) -> None:
    results = checked(REFERENCE, tmp_path, nproc=2)
    assert results.answer == "right", results.findings
    weights = next(finding for finding in results.findings if finding.question == "initial weights")
    assert weights.answer == "right"


ADAPTED = """import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(SEED)
base = nn.Linear(6, 8).requires_grad_(False)
torch.manual_seed(0)
model = nn.Sequential(base, nn.Tanh(), nn.Linear(8, 4))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
rows = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(rows, rows[:, :4].argmax(1))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(data, batch_size=4, sampler=sampler):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.check
@pytest.mark.parametrize(("seed", "answer"), [("0", "right"), ("dist.get_rank()", "differs")])
def test_replicas_of_frozen_shards_begin_alike(seed: str, answer: str, tmp_path: Path) -> None:
    results = checked(ADAPTED.replace("SEED", seed), tmp_path, "--no-replay", nproc=2)
    weights = next(finding for finding in results.findings if finding.question == "initial weights")
    assert weights.answer == answer, results.findings
