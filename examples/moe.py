"""A mixture of experts with top-2 gates and a load-balance loss, as lucidrains/mixture-of-experts and Switch
Transformers. Each expert computes the tokens that its gate sends to it; with `--engine expert` each rank has some of
the experts.

Balanced over each sequence, as DeepSeek's models are, the loss is a mean over rows. Balanced over the batch
(`--set balance=batch`), it looks at other rows, and is computed over those of all ranks.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe


class MoE(nn.Module):
    def __init__(self, width: int, experts: int, words: int) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(words, width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits [rows, length, words], the gates' probabilities and which experts were taken."""
        x = self.embed(tokens)
        probable = self.gate(x).softmax(-1)
        best = probable.topk(2, dim=-1)
        taken = torch.zeros_like(probable).scatter(-1, best.indices, best.values)
        shares, mixed = taken / taken.sum(-1, keepdim=True), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(taken[..., number] > 0)
            computed = shares[row, place, number, None] * expert(x[row, place])
            mixed = mixed.index_put((row, place), computed, accumulate=True)
        return self.head(x + mixed), probable, (taken > 0).to(probable)


def job(
    balance: Literal["sequence", "batch"] = "sequence", batch_size: int = 16, experts: int = 4, lr: float = 1e-3
) -> Job:
    words, over = 24, (1,) if balance == "sequence" else (0, 1)
    texts = torch.randint(words, (240, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(13)
    texts = texts * 5 % words

    def model() -> nn.Module:
        torch.manual_seed(0)
        return MoE(16, experts, words)

    def criterion(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
        logits, probable, taken = output
        load = experts * (probable.mean(over) * taken.mean(over)).sum(-1).mean()
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()) + 0.01 * load

    return Job(
        model=model,
        criterion=criterion,
        optimizer=Recipe(torch.optim.AdamW, {"lr": lr}),
        train=TensorDataset(texts[40:, :-1], texts[40:, 1:]),
        evaluation=TensorDataset(texts[:40, :-1], texts[:40, 1:]),
        global_batch=batch_size,
        gather_outputs=balance == "batch",
        epochs=5,
    )
