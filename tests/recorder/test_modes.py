"""A model that an evaluation has left in evaluation mode is told from one that is trained in it on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from lane_marks import CHECK
from recorder.plant import checked

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
torch.manual_seed(1 + dist.get_rank())
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DDP(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()
for step, (inputs, targets) in enumerate(loader):
    {before}
    loss = F.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 2:
        model.eval()
        with torch.no_grad():
            print(F.cross_entropy(model.module(inputs), targets).item())
        {after}
dist.destroy_process_group()
"""
# Adversarial examples, whose gradients are of the inputs alone, are made in evaluation mode.
ATTACK = """
    model.eval()
    inputs.requires_grad_()
    F.cross_entropy(model(inputs), targets).backward()
    inputs = (inputs + 0.01 * inputs.grad.sign()).detach()
    model.train()
"""


def test_one_rank_in_evaluation_mode_differs(tmp_path: Path) -> None:
    (finding,) = _found(tmp_path, after="model.train(dist.get_rank() == 1)")
    assert finding == ("differs", {"ranks": [0], "step": 3})


@CHECK
def test_all_ranks_in_evaluation_mode_are_warned_of(tmp_path: Path) -> None:
    (finding,) = _found(tmp_path, after="pass")
    assert finding == ("warning", {"ranks": [0, 1], "step": 3})


@CHECK
@pytest.mark.parametrize("before", ["pass", ATTACK.strip(), "model.eval()"], ids=["train", "attack", "always"])
def test_a_mode_that_is_meant_is_passed_over(before: str, tmp_path: Path) -> None:
    assert _found(tmp_path, before=before, after="model.train()") == []


def _found(folder: Path, *, before: str = "pass", after: str) -> list[tuple[str, object]]:
    """Returns the answer and the fields of what is found of the mode."""
    results = checked(SCRIPT.replace("{before}", before).replace("{after}", after), folder)
    found = [finding for finding in results.findings if finding.message.id == "left_in_evaluation_mode"]
    return [(finding.answer, dict(finding.message.fields)) for finding in found]
