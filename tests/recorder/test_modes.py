"""A model that an evaluation has left in evaluation mode is told from one that is in it on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from lane_marks import CHECK
from recorder.plant import checked
from samestep.records.findings import Finding

SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def evaluate(net, inputs, targets):
    net.eval()
    with torch.no_grad():
        print(F.cross_entropy(net(inputs), targets).item())

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DDP(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), {layer}, nn.Linear(8, 3)))
torch.manual_seed(1 + dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()
for step, (inputs, targets) in enumerate(loader):
    {before}
    optimizer.zero_grad()
    {attack}
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if step % 4 == 2:
        evaluate(model.module, inputs, targets)
        {after}
dist.destroy_process_group()
"""
DROPOUT, NO_MODES = "nn.Dropout(0.2)", "nn.LayerNorm(8)"
# Adversarial examples, whose gradients are of the inputs alone, are made in evaluation mode.
ATTACK = """model.eval()
    inputs.requires_grad_()
    F.cross_entropy(model.module(inputs), targets).backward({inputs})
    inputs = (inputs + 0.01 * inputs.grad.sign()).detach()
    model.train()
"""
# The generator's step is taken through a discriminator in evaluation mode.
GAN = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
G = DDP(nn.Linear(3, 4))
D = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
of_g, of_d = torch.optim.SGD(G.parameters(), lr=0.1), torch.optim.SGD(D.parameters(), lr=0.1)
real = torch.randn(64, 4)
torch.manual_seed(1 + dist.get_rank())
for step in range(8):
    fake = G(torch.randn(4, 3))
    D.train()
    of_d.zero_grad()
    (D(fake.detach()).mean() - D(real[8 * step + dist.get_rank() :: 64]).mean()).backward()
    of_d.step()
    D.eval()
    of_g.zero_grad()
    (-D(fake).mean()).backward()
    of_g.step()
dist.destroy_process_group()
"""


def test_one_rank_in_evaluation_mode_differs(tmp_path: Path) -> None:
    (finding,) = _found(tmp_path, _script(after="model.train(dist.get_rank() == 1)"))
    assert (finding.answer, dict(finding.message.fields)) == ("differs", {"ranks": [0], "step": 3})
    assert "+    model.train()" in finding.patch.splitlines()


@CHECK
def test_all_ranks_in_evaluation_mode_are_warned_of(tmp_path: Path) -> None:
    (finding,) = _found(tmp_path, _script(after="pass"))
    assert (finding.answer, dict(finding.message.fields)) == ("warning", {"ranks": [0, 1], "step": 3})


HEALTHY = {
    "train": lambda: _script(),
    "always": lambda: _script(before="model.eval()"),
    "attack": lambda: _script(before=ATTACK.replace("{inputs}", "")),
    "attack on the inputs alone": lambda: _script(attack=ATTACK.replace("{inputs}", "inputs=[inputs]")),
    "no layer with two modes": lambda: _script(layer=NO_MODES, after="pass"),
    "discriminator": lambda: GAN,
}


@CHECK
@pytest.mark.parametrize("name", HEALTHY)
def test_a_mode_that_is_meant_is_passed_over(name: str, tmp_path: Path) -> None:
    assert _found(tmp_path, HEALTHY[name]()) == []


def _script(*, layer: str = DROPOUT, before: str = "pass", attack: str = "pass", after: str = "model.train()") -> str:
    text = SCRIPT
    for name, lines in (("layer", layer), ("before", before), ("attack", attack), ("after", after)):
        text = text.replace(f"{{{name}}}", lines)
    return text


def _found(folder: Path, script: str) -> list[Finding]:
    """Returns what is found of the mode."""
    results = checked(script, folder)
    assert results.steps >= 8
    return [finding for finding in results.findings if finding.message.id == "left_in_evaluation_mode"]
