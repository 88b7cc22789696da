"""An LSTM that tags each word, as torch's own sequence tutorial, in padded batches.

The loss is the mean over words, not over sentences: `weight` says how many words a row has. Without it (`--set
weighted=false`, as nearly every script has it) two ranks train something else, and `verify` answers "no".
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from samestep import Batch, Job, Recipe

WORDS, TAGS, PADDING = 40, 5, -100


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Sentences of 2 to 30 words; a word's tag depends on it and on the one before."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 31, (rows,), generator=draw).tolist()
        self.texts = [torch.randint(1, WORDS, (length,), generator=draw) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = self.texts[index]
        return words, (words + words.roll(1)) % TAGS


class Tagger(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        self.lstm, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, TAGS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(words))[0])


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    words, tags = zip(*samples)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=PADDING)


def mean_over_words(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), ignore_index=PADDING)


def job(rows: int = 300, batch_size: int = 16, lr: float = 0.1, epochs: int = 10, weighted: bool = True) -> Job:
    train, held_out = Sentences(rows, 0), Sentences(rows // 5, 1)

    def model() -> nn.Module:
        torch.manual_seed(1)
        return Tagger(16)

    return Job(
        model=model,
        criterion=mean_over_words,
        weight=(lambda index: float(len(train.texts[index]))) if weighted else None,
        evaluation_weight=(lambda index: float(len(held_out.texts[index]))) if weighted else None,
        optimizer=Recipe(torch.optim.SGD, {"lr": lr}),
        train=train,
        evaluation=held_out,
        collate=padded,
        global_batch=batch_size,
        epochs=epochs,
    )
