"""Low-rank adapters on a frozen network, as microsoft/LoRA and peft: only A and B train.

`requires_grad_(False)` in `model` is all that a Job needs; engines synchronise and step what trains.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.jobs.digits import read


class LoRALinear(nn.Module):
    def __init__(self, frozen: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, alpha / rank
        self.lora_a = nn.Parameter(torch.randn(rank, frozen.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class Adapted(nn.Module):
    """A network whose linear layers are frozen, each with an adapter."""

    def __init__(self, base: nn.Sequential, rank: int, alpha: float) -> None:
        super().__init__()
        base.requires_grad_(False)
        layers = [LoRALinear(layer, rank, alpha) if isinstance(layer, nn.Linear) else layer for layer in base]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def job(batch_size: int = 32, lr: float = 1e-3, rank: int = 4, alpha: float = 8.0, epochs: int = 5) -> Job:
    scans = read()
    images, labels = scans[:, :-1].float() / 16, scans[:, -1]

    def model() -> nn.Module:
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 10))
        return Adapted(base, rank, alpha)  # in a script of your own: base.load_state_dict(…) first

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(
            torch.optim.AdamW,
            {"lr": lr, "weight_decay": 0.0},
            groups=lambda model: [{"params": [p for p in model.parameters() if p.requires_grad]}],
        ),
        train=TensorDataset(images[:1500], labels[:1500]),
        evaluation=TensorDataset(images[1500:], labels[1500:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        save="trainable",  # the adapters alone
        global_batch=batch_size,
        epochs=epochs,
    )
