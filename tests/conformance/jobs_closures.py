"""Jobs whose optimizer computes the loss of a step again and again: LBFGS, with and without a line search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe

ROWS, WIDTH = 37, 5
INPUTS = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sin() @ torch.linspace(-1, 1, WIDTH)).round().clamp(-1, 1).long() + 1


class Extrapolated(Optimizer):
    """Moves the weights before it asks for a gradient, asks for two, and takes steps as large as the loss."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        rate = float(self.param_groups[0]["lr"])
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.99)
            for _ in range(2):
                loss = float(closure())
                for parameter in parameters:
                    parameter.sub_(rate * loss * parameter.grad)
        return loss


def _job(network: Callable[[], nn.Module], optimizer: Recipe, **changed: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return network()

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=optimizer,
        train=TensorDataset(INPUTS, TARGETS),
        evaluation=TensorDataset(INPUTS[:9], TARGETS[:9]),
        metrics={"accuracy": lambda output, batch: output.argmax(-1) == batch.targets},
        **{"global_batch": 12, **changed},
    )


def _mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), *between, nn.Tanh(), nn.Linear(6, 3))


WOLFE = Recipe(torch.optim.LBFGS, {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"})
STEADY = {"lr": 0.02, "max_iter": 3, "history_size": 1, "tolerance_grad": 0.0, "tolerance_change": 0.0}
FIXED = Recipe(torch.optim.LBFGS, STEADY)  # which always evaluates as often


def line_search() -> Job:
    """In micro-batches, with masks: of 12 rows, and 1 in the last step."""
    return _job(lambda: _mlp(nn.Dropout(0.3)), WOLFE, micro_batch=2)


def normalized() -> Job:
    """BatchNorm counts every evaluation, as in a loop by hand."""
    return _job(lambda: _mlp(nn.BatchNorm1d(6)), FIXED, global_batch=16, last="drop")


def clipped() -> Job:
    return _job(lambda: _mlp(nn.Dropout(0.3)), FIXED, micro_batch=3, clip_norm=0.3)


def averaged() -> Job:
    """With a schedule, an average of weights and weighted rows."""
    schedule = LRSchedule(lambda optimizer: ExponentialLR(optimizer, 0.8))
    weights = torch.linspace(0.5, 2, ROWS).tolist()

    def criterion(output: Tensor, batch: Any) -> Tensor:
        of_rows = torch.tensor([weights[row] for row in batch.micro_batch.indices], dtype=output.dtype)
        return (F.cross_entropy(output, batch.targets, reduction="none") * of_rows).sum() / of_rows.sum()

    return replace(
        _job(_mlp, FIXED, scheduler=schedule, ema=0.9, global_batch=7), criterion=criterion, weight=weights.__getitem__
    )


def few() -> Job:
    """Of 2 rows: on 3 ranks the last one has none."""
    return _job(_mlp, FIXED, global_batch=2)


def extrapolated() -> Job:
    return _job(_mlp, Recipe(Extrapolated, {"lr": 0.1}))
