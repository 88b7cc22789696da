"""Jobs with phases: a GAN with other optimizers, an actor with a critic and a frozen part, losses over all rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from samestep import Batch, Job, LRSchedule, Phase, Recipe

X = torch.randn(60, 12, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].sum(1, keepdim=True)


def _seeded(network: Any) -> Any:
    def model() -> nn.Module:
        torch.manual_seed(0)
        built: nn.Module = network()
        return built

    return model


class Gan(nn.Module):
    """Judges real rows and those that it makes of noise. The noise is the first four numbers of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.G = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 12))
        self.D = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.2), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Any:
        fake = self.G(noise)
        if real is None:
            return self.D(fake)
        return self.D(real), self.D(fake.detach())


def with_noise(sample: tuple[Tensor, ...], generator: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, generator=generator, dtype=sample[0].dtype), sample[0]


def judged(logits: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def gan() -> Job:
    """49 rows: the last batch has one. Accumulation, clipping, two classes of optimizers, a schedule."""
    return Job(
        model=_seeded(Gan),
        phases=(
            Phase(
                "discriminator",
                parameters="D",
                forward=lambda model, batch: model(*batch.data),
                criterion=lambda output, batch: judged(output[0], 1.0) + judged(output[1], 0.0),
                optimizer=Recipe(torch.optim.Adam, {"lr": 1e-2, "betas": (0.5, 0.999)}),
            ),
            Phase(
                "generator",
                parameters=("G",),
                forward=lambda model, batch: model(batch.inputs),
                criterion=lambda output, batch: judged(output, 1.0),
                optimizer=Recipe(torch.optim.RMSprop, {"lr": 1e-2}, lambda model: [{"params": model.G.parameters()}]),
            ),
        ),
        train=TensorDataset(X[:49]),
        augment=with_noise,
        global_batch=12,
        micro_batch=3,
        clip_norm=0.5,
        scheduler=LRSchedule(lambda optimizer: LambdaLR(optimizer, lambda count: 0.8**count)),
        epochs=2,
    )


class ActorCritic(nn.Module):
    """A trunk that the critic trains, two heads, and a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.act, self.value = nn.Linear(12, 8), nn.Linear(8, 4), nn.Linear(8, 1)
        self.table = nn.Linear(12, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x) + self.table(x))
        return self.act(hidden), self.value(hidden)


def _critics(model: Any) -> Iterable[nn.Parameter]:
    return [*model.trunk.parameters(), *model.value.parameters()]


def _policy_loss(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    logits, value = output
    action = (batch.inputs[:, 0] > 0).long()
    chosen = logits.log_softmax(1).gather(1, action[:, None])
    return -(chosen * (batch.targets - value.detach())).mean()


def actor_critic() -> Job:
    """One forward pass for all phases, averaged weights, an epoch's schedule, an evaluation."""
    return Job(
        model=_seeded(ActorCritic),
        phases=(
            Phase("critic", _critics, lambda o, b: F.mse_loss(o[1], b.targets), Recipe(torch.optim.SGD, {"lr": 0.1})),
            Phase("actor", "act", _policy_loss, Recipe(torch.optim.AdamW, {"lr": 1e-2})),
        ),
        train=TensorDataset(X[:47], Y[:47]),
        evaluation=TensorDataset(X[47:], Y[47:]),
        metrics={"value": lambda output, batch: output[1].squeeze(1)},
        global_batch=10,
        ema=0.7,
        scheduler=LRSchedule(lambda optimizer: LambdaLR(optimizer, lambda count: 0.5**count), every="epoch"),
        epochs=2,
    )


def contrastive() -> Job:
    """Three phases, one of which looks at all rows of a step."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict(
                {"first": nn.Linear(12, 6), "second": nn.Linear(12, 6), "head": nn.Linear(12, 1)}
            )

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            first, second = self.parts["first"](x), self.parts["second"](x)
            return first, second, self.parts["head"](torch.cat([first, second], 1))

    def matched(output: tuple[Tensor, ...], batch: Batch) -> Tensor:
        return F.cross_entropy(output[0] @ output[1].T, torch.arange(len(output[0])))

    adam = Recipe(torch.optim.Adam, {"lr": 1e-2})
    return Job(
        model=_seeded(Towers),
        phases=(
            Phase("first", "parts.first", matched, adam),
            Phase("second", "parts.second", matched, Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.5})),
            Phase("head", "parts.head", lambda output, batch: F.mse_loss(output[2], batch.targets), adam),
        ),
        train=TensorDataset(X[:49], Y[:49]),
        global_batch=12,
        gather_outputs=True,
        epochs=2,
    )
