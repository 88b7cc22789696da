"""Batches of like lengths, as fairseq's and Hugging Face's `group_by_length` make them: little padding.

`order=ByLength(…)` puts rows of like lengths into one batch and shuffles the batches in each epoch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from samestep import Batch, ByLength, Job, Recipe

WORDS = 30


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """Texts of 2 to 40 words; the label says whether word 1 or word 2 is in it more often."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 41, (rows,), generator=draw).tolist()
        self.texts = [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = self.texts[index]
        return words, ((words % 3 == 1).sum() > (words % 3 == 2).sum()).long()


class Pooled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width, padding_idx=0), nn.Linear(width, 2)
        self.inner = nn.Linear(width, width)

    def forward(self, words: Tensor) -> Tensor:
        there = (words > 0).unsqueeze(-1)
        return self.head((F.gelu(self.inner(self.embed(words))) * there).sum(1) / there.sum(1))


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    words, labels = zip(*samples)
    return pad_sequence(words, batch_first=True), torch.stack(labels)


def mean_over_texts(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch.targets)


def job(rows: int = 400, batch_size: int = 16, lr: float = 1e-2, epochs: int = 10) -> Job:
    train = Texts(rows, 0)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Pooled(16)

    return Job(
        model=model,
        criterion=mean_over_texts,
        optimizer=Recipe(torch.optim.Adam, {"lr": lr}),
        train=train,
        evaluation=Texts(rows // 5, 1),
        collate=padded,
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        order=ByLength([len(text) for text in train.texts]),
        global_batch=batch_size,
        epochs=epochs,
    )
