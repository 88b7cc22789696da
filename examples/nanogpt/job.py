"""nanoGPT (https://github.com/karpathy/nanoGPT, train.py) as a Job, in our own words. README.md maps its lines.

    samestep verify examples/nanogpt/job.py:small --nproc 2
    samestep run examples/nanogpt/job.py --engine ddp --nproc 2 --set data=FOLDER

FOLDER holds input.txt, such as tiny Shakespeare; without one it learns the seven sonnets beside this file. The defaults
are those of nanoGPT's config/train_shakespeare_char.py; `small` is the same job with a small network and no dropout.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from gpt import GPT, GPTConfig  # the model's file lies beside this one
from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep import Job, LRSchedule, Recipe

SONNETS = Path(__file__).parent


class TextWindows(Dataset[tuple[Tensor, Tensor]]):
    """Row n is a window into the text that begins at starts[n], and the same one token later."""

    def __init__(self, text: Tensor, starts: Tensor, block_size: int) -> None:
        self.text, self.starts, self.block_size = text, starts, block_size

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[self.starts[index] :][: self.block_size + 1]
        return window[:-1], window[1:]


def read(data: Path) -> tuple[Tensor, list[str]]:
    """Returns a text's characters as numbers [length], int64, and its vocabulary."""
    text = (data / "input.txt").read_text(encoding="utf-8")
    characters = sorted(set(text))
    number = {character: n for n, character in enumerate(characters)}
    return torch.tensor([number[character] for character in text]), characters


def job(
    data: Path = SONNETS,
    batch_size: int = 64,
    gradient_accumulation_steps: int = 1,
    block_size: int = 256,
    n_layer: int = 6,
    n_head: int = 6,
    n_embd: int = 384,
    dropout: float = 0.2,
    learning_rate: float = 1e-3,
    min_lr: float = 1e-4,
    max_iters: int = 5000,
    warmup_iters: int = 100,
    weight_decay: float = 0.1,
    beta2: float = 0.99,
    grad_clip: float = 1.0,
    seed: int = 1337,
) -> Job:
    text, characters = read(data)
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    config = GPTConfig(len(characters), block_size, n_layer, n_head, n_embd, dropout)
    rows = batch_size * gradient_accumulation_steps  # of one optimizer step
    # get_batch draws each window's start anew, with replacement: here all starts of the training are drawn at once.
    starts = torch.randint(len(train) - block_size, (max_iters * rows,), generator=torch.Generator().manual_seed(seed))

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return GPT(config)

    def warmed_up_cosine(step: int) -> float:
        if step < warmup_iters:
            return (step + 1) / (warmup_iters + 1)
        done = min(1.0, (step - warmup_iters) / max(1, max_iters - warmup_iters))
        floor = min_lr / learning_rate
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return Job(
        model=model,
        forward=lambda gpt, batch: gpt(batch.inputs, batch.targets),
        criterion=lambda output, batch: output[1],
        optimizer=Recipe(
            torch.optim.AdamW,
            {"lr": learning_rate, "betas": (0.9, beta2)},
            groups=lambda gpt: gpt.decay_groups(weight_decay),  # type: ignore[operator, no-any-return]
        ),
        scheduler=LRSchedule(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, warmed_up_cosine)),
        train=TextWindows(train, starts, block_size),
        evaluation=TextWindows(held_out, torch.arange(0, len(held_out) - block_size, block_size), block_size),
        global_batch=rows,
        micro_batch=batch_size,
        clip_norm=grad_clip,
        shuffle=False,  # the starts are random already
        seed=seed,
    )


def small(max_iters: int = 40, dropout: float = 0.0) -> Job:
    """Two layers and short windows, which a laptop proves in seconds; two ranks accumulate two micro-batches a step."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 8, "warmup_iters": 4}
    return job(**sizes, gradient_accumulation_steps=4, max_iters=max_iters, dropout=dropout)
