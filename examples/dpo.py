"""Direct preference optimization, as eric-mitchell/direct-preference-optimization and trl's DPOTrainer: a policy
learns to prefer the chosen answer over the rejected one, against a frozen copy of itself.

Policy and reference are one module, so that an engine wraps both and only the policy trains. A row is a pair of
answers.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe

WORDS, LENGTH = 30, 10


class LanguageModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(WORDS, width),
            nn.GRU(width, width, batch_first=True),
            (nn.Linear(width, WORDS)),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the log probability of each text. shape [rows]"""
        logits = self.head(self.rnn(self.embed(tokens[:, :-1]))[0]).log_softmax(-1)
        return logits.gather(2, tokens[:, 1:, None]).sum((1, 2))


class Preference(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = policy, copy.deepcopy(policy).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Returns by how much more the policy prefers the chosen text than the reference does. shape [rows]"""
        texts = torch.cat([chosen, rejected])
        with torch.no_grad():
            usual = self.reference(texts)
        better, worse = (self.policy(texts) - usual).chunk(2)
        return better - worse


def job(batch_size: int = 16, beta: float = 0.1, lr: float = 1e-3, rows: int = 200, width: int = 16) -> Job:
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(WORDS, (2, rows, LENGTH), generator=draw)
    chosen, rejected = texts[0].sort(dim=1).values, texts[1]  # who prefers words in order?

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Preference(LanguageModel(width))

    return Job(
        model=model,
        forward=lambda network, batch: network(batch.inputs, batch.targets),
        criterion=lambda margin, batch: -F.logsigmoid(beta * margin).mean(),
        optimizer=Recipe(
            torch.optim.RMSprop, {"lr": lr}, groups=lambda model: [{"params": list(model.policy.parameters())}]
        ),
        train=TensorDataset(chosen[40:], rejected[40:]),
        evaluation=TensorDataset(chosen[:40], rejected[:40]),
        metrics={"accuracy": lambda margin, batch: margin > 0},
        global_batch=batch_size,
        epochs=3,
        clip_norm=10.0,
    )
