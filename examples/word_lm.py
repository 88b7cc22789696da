"""An LSTM that predicts the next word, as pytorch/examples/word_language_model, clipped, with tied weights.

The text is cut into `batch_size` lanes. The hidden state goes from one window of a lane to the next, without its graph
(truncated BPTT). The evaluation's windows each begin with a state of zeros.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset

from samestep import Job, Lanes, Recipe, Windows

TEXT = Path(__file__).parent / "nanogpt" / "input.txt"


class RNNModel(nn.Module):
    def __init__(self, words: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True)
        self.decoder = nn.Linear(width, words, bias=False)
        self.decoder.weight = self.encoder.weight  # tied
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.rnn(self.drop(self.encoder(tokens)), state)
        return self.decoder(self.drop(hidden)), state


def job(
    data: Path = TEXT, batch_size: int = 20, bptt: int = 12, lr: float = 2.0, width: int = 32, dropout: float = 0.0
) -> Job:
    words = data.read_text(encoding="utf-8").split()
    number = {word: n for n, word in enumerate(sorted(set(words)))}
    windows = Windows(torch.tensor([number[word] for word in words]), bptt)
    held_out = len(windows) // 10

    def model() -> nn.Module:
        torch.manual_seed(1111)
        return RNNModel(len(number), width, 2, dropout)

    return Job(
        model=model,
        forward=lambda network, batch: network(batch.inputs, batch.state),
        carry_state=True,
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr}),
        train=Subset(windows, range(held_out, len(windows))),
        evaluation=Subset(windows, range(held_out)),
        global_batch=batch_size,
        order=Lanes(),
        last="drop",
        clip_norm=0.25,
        epochs=40,
    )
