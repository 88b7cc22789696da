"""Jobs that carry a state from step to step: LSTMs over lanes of a text, whole, in micro-batches, with few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Lanes, Recipe, Windows

WORDS, LENGTH, WIDTH = 11, 4, 6
DRAWN = torch.randint(0, WORDS, (400,), generator=torch.Generator().manual_seed(0))
TEXT = (DRAWN.cumsum(0) // 7) % WORDS  # a word depends on those before it

State = tuple[Tensor, Tensor] | None


class Words(nn.Module):
    """An LSTM. Its state has rows in the second dimension, as torch's has."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(dropout)
        self.rnn, self.decoder = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WORDS)
        for parameter in self.rnn.parameters():
            parameter.data.mul_(3)  # what is carried is to matter

    def forward(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.rnn(self.drop(self.embedding(tokens)), state)
        return self.decoder(hidden), state


class Memory(nn.Module):
    """Keeps a vector for each row, rows first, and counts the steps of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WORDS * LENGTH)

    def forward(self, tokens: Tensor, state: dict[str, Any] | None) -> tuple[Tensor, dict[str, Any]]:
        words = self.embedding(tokens).sum(1)
        state = state or {"memory": torch.zeros_like(words), "steps": 0}
        memory = self.mix(torch.cat([words, state["memory"]], 1)).tanh()
        output = self.decoder(memory).view(-1, LENGTH, WORDS) * (1 + state["steps"])
        return output, {"memory": memory, "steps": state["steps"] + 1}


def _job(network: Any, batch: int, **changed: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        built: nn.Module = network()
        return built

    windows = Windows(TEXT, LENGTH)
    rows = 5 * batch + 1
    pairs = [windows[index] for index in range(rows)]
    return Job(
        model=model,
        forward=lambda network, batch: network(batch.inputs, batch.state),
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-2}),
        train=TensorDataset(*map(torch.stack, zip(*pairs))),
        evaluation=TensorDataset(*map(torch.stack, zip(*pairs[:9]))),
        metrics={"accuracy": lambda output, batch: (output.argmax(-1) == batch.targets).float().mean(1)},
        global_batch=batch,
        carry_state=True,
        order=Lanes(),
        last="drop",
        **changed,
    )


def lstm() -> Job:
    return _job(Words, 12, clip_norm=0.5)


def accumulated() -> Job:
    """Of 7 rows and 2 at a time: micro-batches of different sizes on the ranks."""
    return _job(Words, 7, micro_batch=2, ema=0.9)


def few() -> Job:
    """Of 2 rows: on 3 ranks the last one has none, and computes others' rows."""
    return _job(Memory, 2)
