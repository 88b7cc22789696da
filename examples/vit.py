"""A vision transformer on small images, as the many `vit-cifar10` scripts: patches, a class token, label smoothing,
AdamW without decay for norms, warmup and cosine."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe
from samestep.jobs.digits import read


class ViT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, patch: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (8 // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1) + self.places
        return self.head(self.encoder(tokens)[:, 0])


def decayed(model: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0}]


def job(batch_size: int = 64, lr: float = 1e-3, epochs: int = 20, width: int = 32, depth: int = 2) -> Job:
    scans = read()
    images, labels = scans[:, :-1].float().reshape(-1, 1, 8, 8) / 16, scans[:, -1]
    steps, warmup = epochs * -(-1500 // batch_size), 10

    def model() -> nn.Module:
        torch.manual_seed(0)
        return ViT(width, depth, heads=2)

    def warmed_up(step: int) -> float:
        return min((step + 1) / warmup, (1 + math.cos(math.pi * min(1.0, step / steps))) / 2)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets, label_smoothing=0.1),
        optimizer=Recipe(torch.optim.AdamW, {"lr": lr, "weight_decay": 0.05}, groups=decayed),
        scheduler=LRSchedule(lambda optimizer: LambdaLR(optimizer, warmed_up)),
        train=TensorDataset(images[:1500], labels[:1500]),
        evaluation=TensorDataset(images[1500:], labels[1500:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=batch_size,
        epochs=epochs,
    )
