"""A training whose averaged weights are evaluated and kept, as timm's ModelEmaV3 and torch's swa_utils.AveragedModel.

`ema_model.update_parameters(model)` after each step, and the second evaluation, are one field: `ema`.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.jobs.digits import read


def job(batch_size: int = 64, lr: float = 0.1, decay: float = 0.99, epochs: int = 10, width: int = 32) -> Job:
    scans = read()
    images, labels = scans[:, :-1].float() / 16, scans[:, -1]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9}),
        train=TensorDataset(images[:1500], labels[:1500]),
        evaluation=TensorDataset(images[1500:], labels[1500:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        ema=decay,
        global_batch=batch_size,
        epochs=epochs,
    )
