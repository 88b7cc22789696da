"""A job that waits for its test twice: in the first step of its second half, and in its last step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe

STEPS = 8


def job(gates: str = "", width: int = 4) -> Job:
    """gates: a folder; the job writes the file 'half' and waits for 'filled', and 'last' and waits for 'end'."""
    rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64) % 3

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(network: nn.Module, batch: Batch) -> Any:
        for step, mine, theirs in ((STEPS // 2, "half", "filled"), (STEPS - 1, "last", "end")):
            if gates and network.training and batch.micro_batch.step == step:
                Path(gates, mine).touch()
                while not Path(gates, theirs).exists():
                    print("waiting", flush=True)  # it must not fail where the log's disk is full
                    time.sleep(0.02)
        return network(batch.inputs)

    def accuracy(output: Tensor, batch: Batch) -> Tensor:
        return output.argmax(1) == batch.targets

    return Job(
        model=model,
        forward=forward,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=TensorDataset(rows, labels),
        evaluation=TensorDataset(rows, labels),
        metrics={"accuracy": accuracy},
        global_batch=16,
        epochs=STEPS // 4,
    )
