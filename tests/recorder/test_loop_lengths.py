"""How often the loops around a step go round: what their heads say, and where they do not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from samestep.recorder.loop_lengths import loops_around
from samestep.recorder.patches import length_of

SCRIPT = """
def train(loader, epochs):
    for epoch in {}:
        for batch in {}:
            step()
for _ in range(7):
    pass
train(loader, 4)
"""


@pytest.mark.parametrize(
    ("epochs", "batches", "rounds"),
    [
        ("range(epochs)", "loader", [3, 4]),
        ("range(1, args.epochs + 1)", "enumerate(tqdm(loader), 1)", [3, 5]),
        ("range(12 // 3 - int(1.5))", "range(len(loader))", [3, 3]),
        ("[1, 2]", "bar(loader)", [None, 2]),
        ("[2, 3]", "range(epoch)", [None, 2]),
        ("bar([1])", "loader", [3, None]),
    ],
)
def test_a_loop_goes_round_as_often_as_its_head_says(
    epochs: str, batches: str, rounds: list[int | None], tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(epochs, batches))
    found = []

    def step() -> None:
        found.append(loops_around(sys._getframe(1), lambda name: name == str(file)))

    loader = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=4)
    held = {"step": step, "loader": loader, "args": SimpleNamespace(epochs=5), "tqdm": list, "bar": iter}
    exec(compile(file.read_text(), str(file), "exec"), held)
    assert [loop.rounds for loop in found[0]] == rounds


def test_a_schedule_says_how_often_it_is_to_be_advanced() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedules: list[LRScheduler] = [CosineAnnealingLR(optimizer, T_max=7), StepLR(optimizer, 3)]
    schedules += [OneCycleLR(optimizer, max_lr=1.0, total_steps=9), ReduceLROnPlateau(optimizer)]
    assert [length_of(schedule) for schedule in schedules] == [7, None, 9, None]
