"""A model with experts, of which ranks can have some each."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Mixture(nn.Module):
    """Two of four experts for each token. noise: in the choice, with a count of the tokens that each expert got."""

    def __init__(self, *, noise: bool) -> None:
        super().__init__()
        self.gate, self.drop = nn.Linear(8, 4, bias=False), nn.Dropout(0.2 * noise)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(4))
        self.load = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.drop(x).flatten(0, -2)
        weights, chosen = (self.gate(tokens) - 0.01 * self.load).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out = out.index_add(0, token, weights[token, place, None] * expert(tokens[token]))
            self.load[number] += len(token) * self.training * (self.drop.p > 0)
        return out.view_as(x)


class Experts(nn.Module):
    def __init__(self, *, noise: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Mixture(noise=noise) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(self.norm(x))
        return self.output(x)  # type: ignore[no-any-return]
