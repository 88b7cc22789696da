"""`samestep diff --resumed-at` on a script that saves a checkpoint and goes on from it: what is lost is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import samestep
from planting import Edit, with_patches
from recorder.plant import cause_of
from samestep.records.files import from_json
from samestep.records.findings import DiffResults
from samestep.report.check import QUANTITIES

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

resumed, STEP = "--resume" in sys.argv, 5
dist.init_process_group("gloo")
torch.manual_seed(0)
rows = torch.randn(24, 6)
data = TensorDataset(rows, rows.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
step = 0
if resumed:
    found = torch.load("checkpoint.pt")
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        if resumed and step < STEP:
            step += 1
            continue
        if step == STEP and not resumed and dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
dist.destroy_process_group()
"""


@pytest.mark.check
def test_a_resumed_script(tmp_path: Path) -> None:
    def check(out: str, text: str, *words: str) -> None:
        (tmp_path / "train.py").write_text(text)
        line = ["check", "--no-replay", "--launcher", "fork", "--out", out, "train.py", *words]
        assert samestep(*line, cwd=tmp_path).returncode in (0, 1, 3)

    def differs(out: str) -> tuple[str, int | None, str]:
        done = samestep("diff", "--json", "whole", out, "--resumed-at", "5", cwd=tmp_path)
        results = from_json(DiffResults, json.loads(done.stdout))
        first = results.first_divergence
        assert done.returncode == int(bool(first)) and results.steps == 3, results.findings
        return (QUANTITIES[first.quantity].id, first.step, cause_of(first)) if first else ("", None, "")

    check("whole", SCRIPT)
    check("right", SCRIPT, "--resume")
    assert differs("right") == ("", None, "")
    not_restored = Edit('    optimizer.load_state_dict(found["optimizer"])\n', "")
    check("moments", with_patches(SCRIPT, not_restored), "--resume")
    assert differs("moments") == ("quantity_weights_after_the_step", 5, "optimizer_state_not_restored")
    check("order", with_patches(SCRIPT, Edit("sampler.set_epoch(epoch)", "sampler.set_epoch(0)")), "--resume")
    assert differs("order") == ("quantity_rows_of_all_ranks", 5, "order_of_another_epoch")
