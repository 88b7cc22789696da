"""The job of many shapes, jobs_drawn.py, with a model that the ranks of every engine can divide: its heads and hidden
layers, its blocks, its positions, its experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jobs_drawn import job as drawn
from torch import Tensor, nn
from torch.nn import functional as F

from samestep import Job

Arch = Literal["mlp", "deep", "batchnorm", "masked", "tied", "unused", "rare"]


class Mixture(nn.Module):
    """Two of four experts for each position. sparse: an expert gets the rows that chose it, and not all of them."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.sparse, self.gate = sparse, nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        shares = torch.zeros_like(x[..., :4]).scatter(-1, chosen, weights)
        if not self.sparse:
            return sum(shares[..., n, None] * expert(x) for n, expert in enumerate(self.experts))  # type: ignore
        rows, out = x.flatten(0, -2), torch.zeros_like(x).flatten(0, -2)
        for share, expert in zip(shares.flatten(0, -2).unbind(-1), self.experts):
            (called,) = torch.where(share > 0)
            if len(called):
                out = out.index_add(0, called, share[called, None] * expert(rows[called]))
        return out.view_as(x)


class Block(nn.Module):
    """Attention by heads, a feed-forward network, and a mixture of experts."""

    def __init__(self, *, dropout: float, sparse: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.key, self.value, self.project = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.mixture = nn.Linear(8, 12), nn.Linear(12, 8), Mixture(sparse=sparse)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        read = self.norm1(x)
        heads = (layer(read).view(rows, length, -1, 2).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(rows, length, -1)
        x = x + self.drop(self.project(attended))
        read = self.norm2(x)
        return x + self.drop(self.down(F.gelu(self.up(read))) + self.mixture(read))  # type: ignore[no-any-return]


class RareBlock(Block):
    """A block with a layer for some rows alone."""

    def __init__(self, *, dropout: float, sparse: bool) -> None:
        super().__init__(dropout=dropout, sparse=sparse)
        self.for_rare = nn.Linear(8, 8)

    def forward(self, x: Tensor, rare: Tensor) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        return x + rare[:, None, None] * self.for_rare(x) if rare.any() else x


class Divisible(nn.Module):
    """Six positions of three numbers, attended to by blocks. arch: what else the model has, as in jobs_drawn.py;
    'rare': a part of a block is called for some rows alone, and not at all where a micro-batch has none of them."""

    def __init__(self, arch: Arch, *, sparse: bool) -> None:
        super().__init__()
        self.embedding, self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if arch == "batchnorm" else nn.Identity()
        dropout = 0.2 if arch == "deep" else 0.0
        self.blocks = nn.ModuleList(Block(dropout=dropout, sparse=sparse) for _ in range(4))
        self.output = nn.Linear(8, 3)
        if arch == "tied":
            self.last.weight = self.first.weight
        if arch == "unused":
            self.spare = nn.Linear(3, 3)
        if arch == "masked":
            self.register_buffer("keep", torch.tensor([True, True, False]))
            self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))
            self.register_buffer("table", torch.tensor([0.5, torch.nan]))
        if arch == "rare":
            self.blocks[2] = RareBlock(dropout=dropout, sparse=sparse)
        self.masks, self.rare = arch == "masked", arch == "rare"

    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embedding(inputs.reshape(len(inputs), 6, 3))))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        rare = inputs.flatten(1)[:, 0] > 1 if self.rare else None
        for block in self.blocks:
            x = block(x) if rare is None or not isinstance(block, RareBlock) else block(x, rare)
        output: Tensor = self.output(torch.tanh(self.last(x.mean(1))))
        return output.where(self.keep, self.mask.clamp(min=-9)) if self.masks else output


def job(
    arch: Arch = "mlp",
    rows: int = 20,
    global_batch: int = 8,
    seed: int = 0,
    optimizer: str = "momentum",
    micro_batch: int = 0,
    clip_norm: float = 0.0,
    every: Literal["step", "epoch", "never"] = "never",
    last: Literal["keep", "drop"] = "keep",
    weighted: bool = False,
    frozen: bool = False,
    stream: bool = False,
    sparse: bool = False,
) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(seed + 1)
        network = Divisible(arch, sparse=sparse)
        if frozen:
            next(network.parameters()).requires_grad_(False)
        return network

    shape = {"rows": rows, "global_batch": global_batch, "seed": seed, "micro_batch": micro_batch, "last": last}
    trained = {"optimizer": optimizer, "clip_norm": clip_norm, "every": every, "weighted": weighted, "stream": stream}
    return replace(drawn(**shape, **trained), model=model)  # type: ignore[arg-type]
