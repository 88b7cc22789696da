"""A contextual bandit that learns from logged choices: inverse propensity scoring, as offline-policy scripts have it.

A logged choice is a row: context, action, its probability, its reward. A learner that acts while it trains has no
dataset and is no Job.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe

ACTIONS = 4


def logged(rows: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    context = torch.randn(rows, 6, generator=draw)
    chances = (0.5 * context[:, :ACTIONS]).softmax(1)
    action = torch.multinomial(chances, 1, generator=draw)[:, 0]
    reward = (action == context[:, 2:].argmax(1)).float()
    return TensorDataset(context, action, chances.gather(1, action[:, None])[:, 0], reward)


def value(output: Tensor, batch: Batch) -> Tensor:
    """What the policy would have earned in each row. shape [rows]"""
    _, action, chance, reward = batch.data
    ratio = output.softmax(1).gather(1, action[:, None])[:, 0] / chance
    return reward * ratio.clamp(max=10.0)


def job(rows: int = 1000, batch_size: int = 64, lr: float = 1e-2, epochs: int = 10) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, ACTIONS))

    return Job(
        model=model,
        forward=lambda policy, batch: policy(batch.data[0]),
        criterion=lambda output, batch: -value(output, batch).mean(),
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}),
        train=logged(rows, 0),
        evaluation=logged(rows // 5, 1),
        metrics={"value": value},
        global_batch=batch_size,
        epochs=epochs,
    )
