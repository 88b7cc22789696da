"""Convolutions over words that classify sentences, as Kim's CNN and its many PyTorch scripts: Adam, class weights.

A loss with class weights divides by its rows' weights, so that the Job is told them, too.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe

WORDS, LENGTH = 50, 12


class TextCNN(nn.Module):
    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, channels, size) for size in (2, 3, 4))
        self.head = nn.Linear(3 * channels, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).transpose(1, 2)
        return self.head(torch.cat([F.relu(conv(x)).amax(2) for conv in self.convs], 1))


def job(rows: int = 400, batch_size: int = 32, lr: float = 1e-3, epochs: int = 10) -> Job:
    texts = torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = (texts < 4).any(1).long()  # a few words decide
    held_out = rows // 5
    weights = len(labels) / (2 * labels.bincount())  # the rarer class counts more

    def model() -> nn.Module:
        torch.manual_seed(0)
        return TextCNN(16, 8)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets, weight=weights.to(output)),
        weight=lambda index: float(weights[labels[held_out + index]]),
        evaluation_weight=lambda index: float(weights[labels[index]]),
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}),
        train=TensorDataset(texts[held_out:], labels[held_out:]),
        evaluation=TensorDataset(texts[:held_out], labels[:held_out]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=batch_size,
        epochs=epochs,
    )
