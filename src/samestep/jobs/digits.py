"""digits: a small conv net on 1,797 real scanned digits, which ship inside scikit-learn. Nothing is downloaded.

The scans are 8x8 pixels from 43 writers: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", 1998.
The last 297 are held out, as scikit-learn's own example does with its later half.
"""

from __future__ import annotations

from math import ceil

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe

TRAIN_ROWS = 1500


def job(
    global_batch: int = 64,
    lr: float = 0.05,
    epochs: int = 10,
    width: int = 16,
    seed: int = 0,
    workers: int = 0,
) -> Job:
    scans = load_digits()
    images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(scans.target)

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 16, 10),
        )

    def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, epochs * ceil(TRAIN_ROWS / global_batch))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9, "weight_decay": 5e-4}),
        scheduler=LRSchedule(cosine),
        train=TensorDataset(images[:TRAIN_ROWS], labels[:TRAIN_ROWS]),
        evaluation=TensorDataset(images[TRAIN_ROWS:], labels[TRAIN_ROWS:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=global_batch,
        epochs=epochs,
        seed=seed,
        workers=workers,
    )
