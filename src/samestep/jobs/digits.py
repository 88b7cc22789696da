"""digits: a small conv net on 1,797 real scanned digits, which ship inside scikit-learn. Nothing is downloaded.

The scans are 8x8 pixels from 43 writers: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", 1998.
The last 297 are held out, as scikit-learn's own example does with its later half.

Any number of ranks trains what one process trains: GroupNorm normalises over a row alone, where BatchNorm would take
the rows of each rank, and nothing draws random numbers. The network is wide enough for a second core to pay: see
docs/results.md, "When more ranks are slower".
"""

from __future__ import annotations

from importlib.util import find_spec
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe
from samestep.errors import UserError

TRAIN_ROWS = 1500


def read() -> torch.Tensor:
    """Returns the 64 pixels (0 to 16) and the label of each scan. shape [1797, 65], int64

    From scikit-learn's file, as its load_digits() does: importing scikit-learn takes as long as importing torch.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError("scikit-learn, which holds the scans, is not installed: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.int64))


def job(
    global_batch: int = 128,
    lr: float = 0.05,
    epochs: int = 10,
    width: int = 80,
    seed: int = 0,
    workers: int = 0,
) -> Job:
    scans = read()
    images = scans[:, :-1].float().reshape(-1, 1, 8, 8) / 16
    labels = scans[:, -1]

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(1, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
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
