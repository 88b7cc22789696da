"""Jobs whose criterion needs all rows of a step: contrastive, two towers with a learned scale, balanced experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe

X = torch.randn(60, 20, generator=torch.Generator().manual_seed(0))
Y = (X[:, :4].sum(1) > 0).long() + (X[:, 4:].sum(1) > 0).long()


def _job(network: Any, criterion: Any, rows: int = 60, **changed: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        built: nn.Module = network()
        return built

    return Job(
        model=model,
        criterion=criterion,
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-2}),
        train=TensorDataset(X[:rows], Y[:rows]),
        global_batch=12,
        gather_outputs=True,
        **changed,
    )


class Towers(nn.Module):
    """Two encoders of halves of a row. Returns their features and a temperature, which is no row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 8), nn.Linear(10, 8)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first, second = F.normalize(self.first(x[:, :10]), dim=1), F.normalize(self.second(x[:, 10:]), dim=1)
        return {"first": first, "second": second, "scale": self.scale.exp()}


def clip_loss(output: dict[str, Tensor], batch: Batch) -> Tensor:
    logits = output["scale"] * output["first"] @ output["second"].T
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def clip() -> Job:
    return _job(Towers, clip_loss)


def supervised_contrastive() -> Job:
    """Pulls rows of one label together. 49 rows: the last batch has one, so that the second rank has none."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        assert len(batch.micro_batch.indices) == batch.micro_batch.rows == len(output) == len(batch.targets)
        alike = (batch.targets[:, None] == batch.targets[None]).to(output) / (1.0 + batch.targets)[:, None]
        near = -torch.cdist(output, output).square()
        return F.cross_entropy(near, alike / alike.sum(1, keepdim=True)) + output.square().mean()

    return _job(lambda: nn.Sequential(nn.Linear(20, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 4)), criterion, 49)


class Experts(nn.Module):
    """Returns the output, the router's probabilities, and the mean size of a hidden value, a mean over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(20, 4), nn.GroupNorm(2, 20)
        self.experts = nn.Parameter(torch.randn(4, 20, 3) / 4)
        self.register_buffer("seen", torch.zeros(4))
        self.seen: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probable = self.router(x).softmax(1)
        hidden = torch.einsum("rw,ewc->rec", self.norm(x), self.experts)
        return torch.einsum("rec,re->rc", hidden, probable), probable, hidden.square().mean()


def balanced_experts() -> Job:
    def criterion(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
        logits, probable, size = output
        taken = F.one_hot(probable.argmax(1), 4).to(probable).mean(0)
        return F.cross_entropy(logits, batch.targets) + 4 * (taken * probable.mean(0)).sum() + 0.1 * size

    return _job(Experts, criterion, 53)


def padded() -> Job:
    """Its rows are as long as the longest beside them."""

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        inputs, targets = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
        longest = 2 + int(inputs.abs().max() * 100) % 17
        return {"inputs": inputs, "padded": torch.zeros(len(rows), longest), "targets": targets}

    return _job(
        lambda: nn.Linear(20, 3),
        lambda output, batch: F.cross_entropy(output, batch.data["targets"]),
        forward=lambda model, batch: model(batch.data["inputs"]),
        collate=collate,
    )
