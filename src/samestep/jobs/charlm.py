"""charlm: a small GPT that learns to write a text, character by character.

    samestep run charlm --set data=tinyshakespeare.txt --engine ddp --nproc 2

The data is any text file, such as tiny Shakespeare (A. Karpathy, char-rnn, 2015), 1.1 million characters. The last
tenth is held out.
Full scale: --set layers=6 --set heads=6 --set width=384 --set length=256 --set dropout=0.2 --set epochs=80. In as many
steps, 5,000, nanoGPT reaches a held-out loss near 1.47 (https://github.com/karpathy/nanoGPT, train_shakespeare_char).
Small: --set limit=4000 --set epochs=3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset
from torchmetrics.text import Perplexity

from samestep import Job, LRSchedule, Recipe
from samestep.errors import UserError
from samestep.jobs.models.gpt import GPT


class Windows(Dataset[Any]):
    """Consecutive windows of `length` characters: (characters, the next character of each). limit: at most; 0: all."""

    def __init__(self, text: Tensor, length: int, limit: int = 0) -> None:
        self.text, self.length = text, length
        count = (len(text) - 1) // length
        self.count = min(count, limit) if limit else count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        return self.text[start : start + self.length], self.text[start + 1 : start + self.length + 1]


def read(data: Path) -> tuple[Tensor, int]:
    """Reads a text file. Returns its characters as numbers [length], int64, and the size of the vocabulary."""
    try:
        text = data.read_text(encoding="utf-8")
        if not text:
            raise OSError("it is empty")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{data} cannot be read as a text ({error}); give one with --set data=FILE.txt") from None
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    occurs = np.bincount(codes) > 0
    return torch.from_numpy((occurs.cumsum() - 1)[codes]), int(occurs.sum())


def job(
    data: Path = Path("input.txt"),
    global_batch: int = 64,
    lr: float = 1e-3,
    epochs: int = 1,
    length: int = 64,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    dropout: float = 0.0,
    limit: int = 0,
    seed: int = 0,
    workers: int = 0,
) -> Job:
    text, vocabulary = read(data)
    if length < 1 or limit < 0:
        raise UserError(f"length is {length} and limit {limit}; give a length of 1 or more, and a limit, 0 for none")
    train = Windows(text[: len(text) * 9 // 10], length, limit)
    held_out = Windows(text[len(text) * 9 // 10 :], length, -(-limit // 4))
    if len(held_out) < 1:
        raise UserError(
            f"{data} has {len(text)} characters, and at least {20 * length} are needed; give a longer text, or a "
            "smaller --set length=…"
        )
    if heads < 1 or width % heads:
        raise UserError(f"width is {width}, which {heads} heads cannot share evenly; give another width or heads")
    steps = epochs * -(-len(train) // global_batch)

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return GPT(vocabulary, length, layers=layers, heads=heads, width=width, dropout=dropout)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.AdamW, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1}),
        scheduler=LRSchedule(lambda optimizer: CosineAnnealingLR(optimizer, steps)),
        train=train,
        evaluation=held_out,
        metrics={"perplexity": Perplexity()},
        global_batch=global_batch,
        epochs=epochs,
        clip_norm=1.0,
        seed=seed,
        workers=workers,
    )
