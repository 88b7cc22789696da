"""A job whose model behaves as torchvision's detection models: `model(images, targets)` returns a dict of losses in
training, and `model(images)` a list of dicts in evaluation, which has no loss; the mAP needs all rows at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep import Job, Recipe
from samestep.job import Batch


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box, self.score = nn.Linear(6, 4), nn.Linear(6, 2)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        rows = torch.stack([image.flatten() for image in images])
        boxes, scores = self.box(rows), self.score(rows)
        if not self.training:
            found = scores.softmax(1).max(1)
            columns = zip(boxes, found.values, found.indices)
            return [{"boxes": b[None], "scores": s[None], "labels": c[None]} for b, s, c in columns]
        assert targets is not None, "targets should not be none when in training mode"
        wanted = torch.cat([target["boxes"] for target in targets])
        labels = torch.cat([target["labels"] for target in targets])
        return {"loss_box_reg": F.mse_loss(boxes, wanted), "loss_classifier": F.cross_entropy(scores, labels)}


class MeanAveragePrecision:
    """The mean over classes of the average precision of detections that are ranked by their scores over all rows."""

    higher_is_better = True

    def reset(self) -> None:
        self.scores, self.found, self.labels = list[Tensor](), list[Tensor](), list[Tensor]()

    def update(self, output: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> None:
        for detected, target in zip(output, targets, strict=True):
            self.scores.append(detected["scores"])
            self.found.append(detected["labels"])
            self.labels.append(target["labels"])

    def compute(self) -> float:
        scores, found, labels = map(torch.cat, (self.scores, self.found, self.labels))
        means = []
        for label in labels.unique():
            mine = found == label
            right = (labels[mine] == label)[scores[mine].argsort(descending=True)].double()
            precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
            means.append(float((precision * right).sum() / (labels == label).sum()))
        return sum(means) / len(means)


def collate(samples: list[Any]) -> tuple[list[Any], list[Any]]:
    images, targets = zip(*samples)
    return list(images), list(targets)


def forward(model: nn.Module, batch: Batch) -> Any:
    return model(batch.inputs, batch.targets) if model.training else model(batch.inputs)


def criterion(output: Any, batch: Batch) -> Tensor | None:
    return None if isinstance(output, list) else sum(output.values())


def losses(output: Any, batch: Batch) -> Any:
    """A criterion for training alone, as a script has it."""
    return sum(output.values())


def model() -> nn.Module:
    torch.manual_seed(0)
    return Detector()


def job(lr: float = 0.05) -> Job:
    generator = torch.Generator().manual_seed(1)
    rows = [
        (
            image := torch.randn(1, 2, 3, generator=generator),
            {"boxes": image.flatten()[None, :4], "labels": (image.sum() > 0).long()[None]},
        )
        for _ in range(70)
    ]
    return Job(
        model=model,
        forward=forward,
        criterion=criterion,
        optimizer=Recipe(torch.optim.SGD, {"lr": lr}),
        train=rows[:40],
        evaluation=rows[40:],
        collate=collate,
        metrics={"map": MeanAveragePrecision()},
        global_batch=8,
    )
