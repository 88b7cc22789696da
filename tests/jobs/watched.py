"""A job whose evaluation is watched: many metrics, and a learning rate that can grow until the loss does."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from samestep import Batch, Job, LRSchedule, Recipe


class Breaking(TensorDataset):
    """Its row 100 cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == 100:
            raise ValueError("a bad shard")
        return super().__getitem__(index)


def counted(metric: str) -> dict[str, Any]:
    """Metrics of torchmetrics, which is imported here alone: that takes seconds."""
    from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix, MulticlassF1Score
    from torchmetrics.text import Perplexity

    class OfRows(Perplexity):
        """Each row as a text of one word."""

        def update(self, output: Tensor, targets: Tensor) -> None:
            super().update(output[:, None], targets[:, None])

    found = {"f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3), "perplexity": OfRows()}
    return found | ({"matrix": MulticlassConfusionMatrix(3)} if metric == "matrix" else {})


def job(
    lr: float = 0.1,
    width: int = 4,
    bias: bool = True,
    grows: bool = False,
    evaluated: bool = True,
    breaks: bool = False,
    metric: Literal["accuracy", "loss", "wide", "matrix"] = "accuracy",
    many: bool = False,
    dropout: float = 0.0,
) -> Job:
    rows = torch.randn(73 + 131, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.cat([torch.arange(73) % 3, torch.arange(131) % 3])
    rows[:, :3] += 0.8 * F.one_hot(labels, 3)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, width, bias=bias), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3))

    def accuracy(output: Tensor, batch: Batch) -> Tensor:
        guessed = output.argmax(1)
        return (guessed[:, None] if metric == "wide" else guessed) == batch.targets

    held_out = (Breaking if breaks else TensorDataset)(rows[73:], labels[73:])

    def top2(output: Tensor, batch: Batch) -> Tensor:
        return (output.topk(2).indices == batch.targets[:, None]).any(1)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr}),
        scheduler=LRSchedule(lambda optimizer: LambdaLR(optimizer, lambda step: 1.4**step if grows else 1.0)),
        train=TensorDataset(rows[:73], labels[:73]),
        evaluation=held_out if evaluated else None,
        metrics={
            "loss" if metric == "loss" else "accuracy": accuracy,
            "top2": top2,
            **(counted(metric) if many else {}),
        },
        global_batch=16,
        epochs=10 if grows else 4,
    )


def merged() -> Job:
    """Its metric counts rows, and adds 1000 times the rank that computes it, as machines of two kinds may differ."""
    from torchmetrics import Metric

    class Merged(Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")
            self.rows: Tensor

        def update(self, output: Tensor, targets: Tensor) -> None:
            self.rows += len(targets)

        def compute(self) -> Tensor:
            return self.rows + 1000.0 * int(os.environ.get("RANK", "0"))

    return replace(job(), metrics={"merged": Merged()}, epochs=1)


def heavy(mib: int = 600, once_mib: int = 0) -> Job:
    """A model of so many MiB, and so many once in step 3, where a rank may have 1000 more than at its start."""
    plain, had = job(), list[int]()

    def model() -> nn.Module:
        limited, _ = resource.getrlimit(resource.RLIMIT_AS)
        if "RANK" in os.environ and limited == resource.RLIM_INFINITY:
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (used + 1000 * 2**20, resource.RLIM_INFINITY))
        network = plain.model()
        network.register_parameter("extra", nn.Parameter(torch.zeros(mib if "RANK" in os.environ else 1, 2**18)))
        return network

    def forward(network: nn.Module, batch: Batch) -> Tensor:
        if "RANK" in os.environ and once_mib and batch.micro_batch.step == 3 and not had:
            had.append(3)
            torch.zeros(once_mib, 2**18)
        output: Tensor = network(batch.inputs)
        return output + 0 * sum(parameter.sum() for parameter in network.parameters())

    return replace(plain, model=model, forward=forward)


def greedy(mib_a_row: int = 128, spare_mib: int = 1000) -> Job:
    """Each row of a batch needs memory, of which a rank may have only so much more than it has when it starts."""
    plain = job()

    def model() -> nn.Module:
        limited, _ = resource.getrlimit(resource.RLIMIT_AS)
        if "RANK" in os.environ and limited == resource.RLIM_INFINITY:  # the inspection sees four rows at most
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (used + spare_mib * 2**20, resource.RLIM_INFINITY))
        return plain.model()

    def forward(network: nn.Module, batch: Batch) -> Tensor:
        if "RANK" in os.environ:
            torch.empty(len(batch.inputs), mib_a_row * 2**18)
        output: Tensor = network(batch.inputs)
        return output

    return replace(plain, model=model, forward=forward)
