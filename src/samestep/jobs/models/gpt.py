"""A small GPT with pre-norm blocks: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal self-attention and a feed-forward network. [rows, length, width] -> [rows, length, width]"""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.attend(self.norm1(x))
        # Of what it reads: ranks that divide the model have other numbers of heads, and of positions in x.
        rows, length, _ = projected.shape
        query, key, value = (
            part.view(rows, length, -1, self.head_size).transpose(1, 2) for part in projected.chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.project(attended.transpose(1, 2).reshape(rows, length, -1)))
        out: Tensor = x + self.drop(self.feed(self.norm2(x)))
        return out


class GPT(nn.Module):
    """Tokens [rows, length] -> logits [rows, length, vocabulary]. The output layer shares the embedding's weights."""

    def __init__(
        self, vocabulary: int, length: int, *, layers: int = 4, heads: int = 4, width: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.token(tokens) + self.place(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
