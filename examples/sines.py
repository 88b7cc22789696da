"""Two LSTM cells that continue sine waves, as pytorch/examples/time_sequence_prediction trains them: LBFGS, all waves at
once, in float64.

The original's closure is gone: samestep calls `forward` and `criterion` as often as LBFGS asks. It evaluates on three
waves.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe


class Sequence(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.lstm1, self.lstm2 = nn.LSTMCell(1, hidden), nn.LSTMCell(hidden, hidden)
        self.linear = nn.Linear(hidden, 1)

    def forward(self, waves: Tensor) -> Tensor:
        h1 = c1 = h2 = c2 = waves.new_zeros(len(waves), self.hidden)
        outputs = []
        for value in waves.split(1, dim=1):
            h1, c1 = self.lstm1(value, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def job(waves: int = 100, length: int = 1000, hidden: int = 51, lr: float = 0.8, steps: int = 15) -> Job:
    shifts = torch.randint(-80, 80, (waves, 1), generator=torch.Generator().manual_seed(2))
    values = ((torch.arange(length) + shifts) / 20).double().sin()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Sequence(hidden).double()

    return Job(
        model=model,
        criterion=lambda output, batch: F.mse_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.LBFGS, {"lr": lr}),
        train=TensorDataset(values[3:, :-1], values[3:, 1:]),
        evaluation=TensorDataset(values[:3, :-1], values[:3, 1:]),
        global_batch=waves - 3,
        epochs=steps,
    )
