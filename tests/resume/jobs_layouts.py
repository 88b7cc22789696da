"""A job whose model the ranks of every layout can divide: by heads and hidden layers, by blocks, by shards."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import TensorDataset

from samestep import Job, LRSchedule, Recipe

TOKENS = torch.randint(11, (58, 7), generator=Generator().manual_seed(0))


class Block(nn.Module):
    """Attention by heads, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.query, self.key, self.value, self.project = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        read = self.norm1(x)
        heads = (layer(read).view(rows, length, -1, 4).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(rows, length, -1)
        x = x + self.project(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Its output layer is its embedding, which the first and the last stage of a pipeline have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(11, 16), nn.ModuleList(Block() for _ in range(4))
        self.norm, self.output = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.blocks[1].norm1.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def _rises_and_falls(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.2, total_iters=4), CosineAnnealingLR(optimizer, 9)]
    return SequentialLR(optimizer, parts, milestones=[4])


def _decayed_and_not(model: nn.Module) -> list[dict[str, object]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]


def carried(steps: int = 12) -> Job:
    """The same training on any mesh, in float64: tied and frozen weights, AdamW with groups, a rate that rises and
    falls, averaged weights, micro-batches, a clipping that acts at every step; four steps an epoch, the last uneven."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return Model().double()

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}, _decayed_and_not),
        scheduler=LRSchedule(_rises_and_falls, every="step"),
        clip_norm=0.05,
        ema=0.7,
        train=TensorDataset(TOKENS[13:, :-1], TOKENS[13:, 1:]),
        evaluation=TensorDataset(TOKENS[:13, :-1], TOKENS[:13, 1:]),
        global_batch=12,
        micro_batch=3,
        max_steps=steps,
    )
