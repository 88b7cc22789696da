"""train.py beside this file as a Job: the loop, the device and the loader are gone, what remains has the same names.

samestep verify examples/plain/job.py --nproc 2
samestep run examples/plain/job.py --engine ddp --nproc 2 --out runs/plain
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe


def job(lr: float = 0.1, epochs: int = 5, batch_size: int = 64) -> Job:
    inputs = torch.randn(1200, 20, generator=torch.Generator().manual_seed(1))
    labels = (inputs.sum(1) > 0).long()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9}),
        scheduler=LRSchedule(lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5), every="epoch"),
        train=TensorDataset(inputs[200:], labels[200:]),
        evaluation=TensorDataset(inputs[:200], labels[:200]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=batch_size,
        epochs=epochs,
        clip_norm=1.0,
    )
