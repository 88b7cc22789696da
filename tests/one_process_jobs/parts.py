"""What the odd jobs are made of. Each of their docstrings begins with the right answer to whether N ranks train the job
as one process does: "yes", "as expected", "not known", or "no ID" with the mistake's id."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from samestep import Batch, Job, Recipe

ODD: dict[str, Callable[[], Job]] = {}


def odd(job: Callable[[], Job]) -> Callable[[], Job]:
    ODD[job.__name__] = job
    return job


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


X = torch.randn(64, 12, generator=_random(0))
Y = (X[:, :3].argmax(1)).long()
WORDS = torch.randint(2, 20, (64, 9), generator=_random(1))
LENGTHS = torch.randint(2, 10, (64,), generator=_random(2))
PADDED = torch.where(torch.arange(9) < LENGTHS[:, None], WORDS, 0)
VALUES = torch.rand(64, generator=_random(3))


def make(network: Callable[[], nn.Module], criterion: Any = None, **changed: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return network()

    fields: dict[str, Any] = {
        "criterion": criterion or mean_loss,
        "optimizer": Recipe(torch.optim.AdamW, {"lr": 1e-2}),
        "train": TensorDataset(X, Y),
        "global_batch": 12,
    }
    return Job(model=model, **(fields | changed))


def mean_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch.targets)


def mlp(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(12, 16), *deepcopy(layers), nn.Tanh(), nn.Linear(16, 3))


class Net(nn.Module):
    """A network whose forward is `change(self, hidden)` between its two layers."""

    def __init__(self, change: Callable[..., Any], buffers: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.last, self.change = nn.Linear(12, 16), nn.Linear(16, 3), change
        for name, buffer in (buffers or {}).items():
            self.register_buffer(name, buffer.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self, torch.tanh(self.first(x))))  # type: ignore[no-any-return]


def net(change: Callable[..., Any], **buffers: Tensor) -> Callable[[], nn.Module]:
    return lambda: Net(change, buffers)


class Words(nn.Module):
    """Predicts a word at each place."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(21, 8)
        if kind == "lstm":
            self.recurrent: nn.Module = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
        elif kind == "attention":
            self.recurrent = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        else:
            self.recurrent = nn.Linear(8, 8)
        self.last = nn.Linear(8, 21)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        if self.kind == "packed":
            hidden = self.recurrent(hidden)
        elif self.kind == "lstm":
            hidden = self.recurrent(hidden)[0]
        elif self.kind == "attention":
            hidden = self.recurrent(hidden, src_key_padding_mask=words == 0)
        else:
            hidden = torch.tanh(self.recurrent(hidden))
        return self.last(hidden)  # type: ignore[no-any-return]


def words(kind: str = "plain", criterion: Any = None, **changed: Any) -> Job:
    inputs = changed.pop("inputs", WORDS)
    fields = {"train": TensorDataset(inputs, changed.pop("labels", inputs)), **changed}
    return make(lambda: Words(kind), criterion or token_mean, **fields)


def token_mean(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), ignore_index=0)


def masked_mean(output: Tensor, batch: Batch) -> Tensor:
    losses = F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    return losses / (batch.targets != -100).sum().clamp(min=1)


def mask_words(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """As Hugging Face's collator for masked language modelling: draws for the whole batch."""
    inputs = torch.stack([sample[0] for sample in samples])
    masked = torch.bernoulli(torch.full(inputs.shape, 0.3)).bool()
    random_words = torch.randint(2, 20, inputs.shape)
    replaced = torch.bernoulli(torch.full(inputs.shape, 0.1)).bool() & masked
    return torch.where(replaced, random_words, torch.where(masked, 1, inputs)), torch.where(masked, inputs, -100)


def masked_count(batch: Batch) -> Tensor:
    return (batch.targets != -100).sum()


def erased(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Erases a place of each row with Python's generator."""
    inputs, targets = (torch.stack(each) for each in zip(*samples))
    places = torch.tensor([random.randrange(12) for _ in samples])
    return inputs.scatter(1, places[:, None], 0.0), targets


FEW = [17, 333, 517, 791, 1013]


class Texts(Dataset[Any]):
    """Rows of unequal lengths, one by one: three short ones, or of `lengths` in turn."""

    def __init__(self, lengths: Tensor | None = None) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 900

    def __getitem__(self, index: int) -> Tensor:
        if self.lengths is not None:
            return WORDS[index % 64][: int(self.lengths[index % 64])]
        return WORDS[index % 64][: 3 if index in (19, 404, 811) else 9]


def stacked(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)
