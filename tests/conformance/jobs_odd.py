"""Jobs that real users write and simple provers stumble over."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from samestep import Batch, Job, LRSchedule, Recipe

X = torch.randn(61, 20, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


class Pairs(Dataset[Any]):
    """A dataset that is no TensorDataset."""

    def __init__(self, first: int, rows: int) -> None:
        self.first, self.rows = first, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[self.first + index], Y[self.first + index]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 2))


def _job(network: Callable[[], nn.Module] = _mlp, **changed: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return network()

    usual: dict[str, Any] = {
        "criterion": lambda output, batch: F.cross_entropy(output, batch.targets),
        "optimizer": Recipe(torch.optim.SGD, {"lr": 0.1}),
        "train": TensorDataset(X[:44], Y[:44]),
        "evaluation": TensorDataset(X[44:], Y[44:]),
        "metrics": {"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        "global_batch": 10,
    }
    return Job(model=model, **(usual | changed))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.output = nn.LSTM(4, 8), nn.Linear(8, 2)

    def forward(self, steps: Tensor) -> Tensor:
        return self.output(self.recurrent(steps)[0][-1])  # type: ignore[no-any-return]


def time_first() -> Job:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x.view(5, 4) for x, _ in samples], 1), torch.stack([y for _, y in samples])

    return _job(TimeFirst, train=Pairs(0, 44), evaluation=Pairs(44, 17), collate=collate)


def side_table() -> Job:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        table = torch.linspace(0.1, 2, 20)
        return {"x": torch.stack([x for x, _ in samples]), "y": [int(y) for _, y in samples], "table": table}

    return _job(
        train=Pairs(0, 44),
        evaluation=Pairs(44, 17),
        collate=collate,
        forward=lambda model, batch: model(batch.data["x"] * batch.data["table"]),
        criterion=lambda output, batch: F.cross_entropy(output, torch.tensor(batch.data["y"])),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == torch.tensor(batch.data["y"])},
    )


def reads_indices() -> Job:
    def criterion(output: Tensor, batch: Batch) -> Tensor:
        weights = 1.0 + torch.from_numpy(batch.micro_batch.indices).to(output) % 4
        return (F.cross_entropy(output, batch.targets, reduction="none") * weights).sum() / len(output)

    return _job(criterion=criterion)


def class_weights() -> Job:
    return _job(criterion=lambda o, batch: F.cross_entropy(o, batch.targets, weight=torch.tensor([1.0, 5.0]).to(o)))


def order_matters() -> Job:
    def criterion(output: Tensor, batch: Batch) -> Tensor:
        steps = output[1:] - 2 * output[:-1]
        return F.cross_entropy(output, batch.targets) + steps.pow(2).sum() / len(output)

    return _job(criterion=criterion)


def autocast() -> Job:
    """torch leaves float64 alone under autocast, so that this is proven as if it were not there."""

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch.inputs)  # type: ignore[no-any-return]

    return _job(forward=forward)


def large_targets() -> Job:
    inputs, sums = 30 * X, 1000 * X.sum(1, keepdim=True)
    return _job(
        lambda: nn.Linear(20, 1),
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        train=TensorDataset(inputs[:44], sums[:44]),
        evaluation=TensorDataset(inputs[44:], sums[44:]),
        optimizer=Recipe(torch.optim.Adam, {"lr": 0.1}),
        metrics={},
    )


class Noisy(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + torch.randn_like(inputs))


def random_in_evaluation() -> Job:
    return _job(lambda: Noisy(20, 2))


class MovingMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 2)
        self.register_buffer("mean", torch.zeros(20), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(inputs.mean(0).detach() * 0.1)
        return self.linear(inputs - self.mean)  # type: ignore[no-any-return]


def buffer_that_is_not_saved() -> Job:
    return _job(MovingMean)


class Standardised(nn.Module):
    """Its statistics are used while it trains: whose they are, and when they travel, shows in the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 2)
        self.register_buffer("mean", torch.zeros(20))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(inputs.mean(0).detach() * 0.5)
        return self.linear(inputs - self.mean)  # type: ignore[no-any-return]


def buffer_that_moves_between_micro_batches() -> Job:
    return _job(Standardised, micro_batch=2)


def class_weights_that_are_given() -> Job:
    weights = torch.tensor([1.0, 2.33])
    return _job(
        criterion=lambda o, batch: F.cross_entropy(o, batch.targets, weight=weights.to(o)),
        weight=lambda index: float(weights[Y[:44][index]]),
        evaluation_weight=lambda index: float(weights[Y[44:][index]]),
    )


def two_kinds_of_datasets() -> Job:
    return _job(evaluation=Pairs(44, 17))


class Exploding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 20) for _ in range(6)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.sin(30 * layer(inputs))
        return inputs


def chaos() -> Job:
    return _job(Exploding)


class Unseeded(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * (1 + random.random()))


def random_numbers_of_python() -> Job:
    return _job(lambda: Unseeded(20, 2))


class Scaled(nn.Module):
    """With a number as a parameter, as CLIP has its logit_scale."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.logit_scale = nn.Linear(20, 2), nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.logit_scale.exp()  # type: ignore[no-any-return]


def scalar() -> Job:
    return _job(Scaled)


def overflows() -> Job:
    """Under fp16 the bias's gradient of 20 overflows until the scale has been halved five times: for one epoch."""
    targets = torch.full((44, 1), 10.0)
    return _job(
        lambda: nn.Linear(20, 1),
        train=TensorDataset(0.1 * X[:44], targets),
        evaluation=None,
        metrics={},
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        scheduler=LRSchedule(lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n), every="epoch"),
    )
