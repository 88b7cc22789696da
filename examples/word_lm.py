"""An LSTM that predicts the next word, as pytorch/examples/word_language_model, clipped, with tied weights.

The original carries the hidden state from one window to the next of its 20 lanes. A Job's rows are independent, so
that here each window begins with a state of zeros: give longer windows (`bptt`) instead.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe

TEXT = Path(__file__).parent / "nanogpt" / "input.txt"


class RNNModel(nn.Module):
    def __init__(self, words: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True)
        self.decoder = nn.Linear(width, words, bias=False)
        self.decoder.weight = self.encoder.weight  # tied
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.drop(self.rnn(self.drop(self.encoder(tokens)))[0]))


def job(
    data: Path = TEXT, batch_size: int = 20, bptt: int = 12, lr: float = 2.0, width: int = 32, dropout: float = 0.0
) -> Job:
    words = data.read_text(encoding="utf-8").split()
    number = {word: n for n, word in enumerate(sorted(set(words)))}
    text = torch.tensor([number[word] for word in words])
    windows = text[: (len(text) - 1) // bptt * bptt + 1].unfold(0, bptt + 1, bptt)
    held_out = len(windows) // 10

    def model() -> nn.Module:
        torch.manual_seed(1111)
        return RNNModel(len(number), width, 2, dropout)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr}),
        train=TensorDataset(windows[held_out:, :-1], windows[held_out:, 1:]),
        evaluation=TensorDataset(windows[:held_out, :-1], windows[:held_out, 1:]),
        global_batch=batch_size,
        clip_norm=0.25,
        epochs=40,
    )
