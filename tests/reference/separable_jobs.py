"""Jobs whose training on several ranks is that of one process, is another as expected, or by a mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Lanes, Recipe

X = torch.randn(60, 20, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
TOKENS = torch.randint(1, 8, (60,), generator=torch.Generator().manual_seed(1))
MASK = (torch.arange(8)[None] < TOKENS[:, None]).long()
PIXELS = torch.rand(60, 20, generator=torch.Generator().manual_seed(2)).round()


def _job(network: Callable[[], nn.Module], criterion: Any = None, targets: Tensor = Y, **changed: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return network()

    return Job(
        model=model,
        criterion=criterion or (lambda output, batch: F.cross_entropy(output, batch.targets)),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        train=changed.pop("train", TensorDataset(X, targets)),
        global_batch=12,
        **changed,
    )


def _mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 16), *layers, nn.ReLU(), nn.Linear(16, 2))


def _token_mean(output: Tensor, batch: Batch) -> Tensor:
    of_token = F.cross_entropy(output.repeat_interleave(8, 0), batch.targets.flatten(), reduction="none")
    return (of_token * batch.targets.flatten()).sum() / batch.targets.sum()


def mean() -> Job:
    return _job(_mlp)


def binary() -> Job:
    """Targets of 1.0, which no noise may move beyond 1."""
    network = nn.Sequential
    return _job(
        lambda: network(nn.Linear(20, 1), nn.Sigmoid(), nn.Flatten(0)),
        lambda output, batch: F.binary_cross_entropy(output, batch.targets),
        Y.float(),
    )


def tokens_with_weights() -> Job:
    return _job(_mlp, _token_mean, MASK, weight=lambda index: float(TOKENS[index]))


def dropout() -> Job:
    return _job(lambda: _mlp(nn.Dropout(0.3)))


def batch_norm() -> Job:
    return _job(lambda: _mlp(nn.BatchNorm1d(16)))


class FunctionalBatchNorm(nn.Module):
    """Normalises and drops by functions, so that no module tells of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.batch_norm(self.first(x), None, None, training=True)
        return self.last(F.dropout(hidden, 0.2, self.training))  # type: ignore[no-any-return]


def batch_norm_and_dropout() -> Job:
    return _job(FunctionalBatchNorm)


def recurrent_dropout() -> Job:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(5, 8, 2, dropout=0.3, batch_first=True)
            self.last = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.recurrent(x.view(len(x), 4, 5))[0][:, -1])  # type: ignore[no-any-return]

    return _job(Recurrent)


class Autoencoder(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(20, 8), nn.Linear(4, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return torch.sigmoid(self.decoder(drawn)), mean, log_variance


def _elbo(reduced: Callable[[Tensor], Tensor]) -> Any:
    def criterion(output: Any, batch: Batch) -> Tensor:
        pixels, mean, log_variance = output
        of_row = F.binary_cross_entropy(pixels, batch.inputs, reduction="none").sum(1)
        return reduced(of_row - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1))

    return criterion


def autoencoder() -> Job:
    return _job(Autoencoder, _elbo(Tensor.mean), train=TensorDataset(PIXELS, PIXELS))


def autoencoder_sum() -> Job:
    return _job(Autoencoder, _elbo(Tensor.sum), train=TensorDataset(PIXELS, PIXELS))


def tokens() -> Job:
    return _job(_mlp, _token_mean, MASK)


def tokens_under_dropout() -> Job:
    return _job(lambda: _mlp(nn.Dropout(0.3)), _token_mean, MASK)


def contrastive() -> Job:
    return _job(_mlp, lambda output, batch: F.cross_entropy(output @ output.T, torch.arange(len(output))))


def contrastive_over_all_rows() -> Job:
    return replace(contrastive(), gather_outputs=True)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output - output.mean(0)


def other_rows_in_forward() -> Job:
    return _job(Centred)


def other_rows_in_forward_with_all_rows() -> Job:
    return replace(other_rows_in_forward(), gather_outputs=True)


class Carried(nn.Module):
    """Keeps its hidden state as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 2)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + (0 if self.hidden is None else self.hidden)
        self.hidden = output.detach().mean(0)
        return output


def carried_state() -> Job:
    return _job(Carried, train=TensorDataset(X[:49], Y[:49]))  # a rank without rows must not move its state


class CarriedOn(nn.Module):
    """Returns its state. by_row: a state of each row's own, and not a mean over them."""

    def __init__(self, by_row: bool) -> None:
        super().__init__()
        self.layer, self.by_row = nn.Linear(20, 2), by_row

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        output: Tensor = self.layer(x) + (0 if state is None else state)
        return output, output if self.by_row else output.mean(0)


def carried_on(by_row: bool = True) -> Job:
    return _job(
        lambda: CarriedOn(by_row),
        forward=lambda model, batch: model(batch.inputs, batch.state),
        carry_state=True,
        order=Lanes(),
        last="drop",
    )


def carried_mean() -> Job:
    return carried_on(by_row=False)


def unused_weights() -> Job:
    return _job(_mlp, weight=lambda index: 1.0 + index % 3)


def ignored_rows() -> Job:
    """The first row's target is ignored, and every third one's."""
    targets = torch.where(torch.arange(60) % 3 == 0, -100, Y)
    return _job(_mlp, lambda output, batch: F.cross_entropy(output, batch.targets), targets, shuffle=False)


def other_ignored_rows() -> Job:
    return replace(ignored_rows(), train=TensorDataset(X[1:], ignored_rows().train.tensors[1][1:]))


def first_row_without_tokens() -> Job:
    """A mean over tokens, of which the first row has none, and the others have one or two."""
    targets = torch.stack(
        [torch.where(torch.arange(60) % 3 > 0, Y, -100), torch.where(torch.arange(60) % 3 > 1, Y, -100)], 1
    )
    return _job(_mlp, _mean_of_tokens, targets, shuffle=False)


def _mean_of_tokens(output: Tensor, batch: Batch) -> Tensor:
    losses = F.cross_entropy(output.repeat_interleave(2, 0), batch.targets.flatten(), reduction="sum")
    return losses / (batch.targets != -100).sum().clamp(min=1)


class Divided(nn.Module):
    """Divides by the deviation over the rows, which one row has not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output / (1 + output.std(0))


def deviation_in_forward() -> Job:
    return _job(Divided)


class Taught(nn.Module):
    """With a teacher that is an average of it, moved as the scripts of BYOL and MoCo do."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(20, 4), nn.Linear(20, 4)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            for mine, its in zip(self.student.parameters(), self.teacher.parameters()):
                its.data = its.data * 0.9 + mine.data * 0.1
        return self.head(self.student(x)), self.teacher(x)


def teacher() -> Job:
    """With a step in which one rank has no rows: its teacher moves, too."""
    return _job(Taught, lambda output, batch: F.mse_loss(*output), train=TensorDataset(X[:49], Y[:49]))


class ActNorm(nn.Module):
    """Sets its scale once, from the rows of its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(1, 20)), nn.Linear(20, 2)
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.scale.data.copy_(1 / x.std(0, keepdim=True))
            self.is_set.fill_(True)
        return self.layer(x * self.scale)  # type: ignore[no-any-return]


def act_norm() -> Job:
    return _job(ActNorm)


class Codebook(nn.Module):
    """A codebook that no optimizer moves, but each batch, as those of vector quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codes = nn.Linear(20, 2), nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        if self.training:
            self.codes.data.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return output + self.codes


def codebook() -> Job:
    return _job(Codebook)


class Prototypes(nn.Module):
    """Normalises its weights in each forward pass, as SwAV does: of no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.prototypes = nn.Linear(20, 8), nn.Linear(8, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.prototypes.weight.data.copy_(F.normalize(self.prototypes.weight.data))
        return self.prototypes(self.layer(x))  # type: ignore[no-any-return]


def prototypes() -> Job:
    return _job(Prototypes)


class Backward(torch.autograd.Function):
    """Returns its rows as they are, and their gradient divided by its norm, or by two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by_norm: bool) -> Tensor:
        ctx.by_norm = by_norm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / (gradient.norm() if ctx.by_norm else 2.0), None


class OwnBackward(nn.Module):
    def __init__(self, by_norm: bool) -> None:
        super().__init__()
        self.first, self.last, self.by_norm = nn.Linear(20, 16), nn.Linear(16, 2), by_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Backward.apply(self.first(x).tanh(), self.by_norm))  # type: ignore[no-any-return,no-untyped-call]


def normalised_gradients() -> Job:
    return _job(lambda: OwnBackward(True))


def halved_gradients() -> Job:
    return _job(lambda: OwnBackward(False))


def _hooked(limit: float) -> nn.Module:
    model = _mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-limit, limit))
    return model


def clamped_gradients() -> Job:
    return _job(lambda: _hooked(0.005))


def clamped_far_away() -> Job:
    """The same hooks, which never act."""
    return _job(lambda: _hooked(1e3))


def _triplets(output: Tensor, batch: Batch) -> Tensor:
    """Of each row, how much further the nearest row of another class is than the furthest of its own; 0 without one."""
    distances = torch.cdist(output, output) + 1e-6
    same = batch.targets[:, None] == batch.targets[None]
    itself = torch.eye(len(output), dtype=torch.bool)
    furthest = distances.masked_fill(~same | itself, -1.0).amax(1)
    nearest = distances.masked_fill(same, 1e6).amin(1)
    counts = (same & ~itself).any(1) & (~same).any(1)
    return ((furthest - nearest + 0.2).relu() * counts).mean()


def triplets() -> Job:
    """Of so many classes that six rows make no pair."""
    return _job(_mlp, _triplets, torch.arange(60) % 8, shuffle=False)


def triplets_over_all_rows() -> Job:
    return replace(triplets(), gather_outputs=True)


class Observed(nn.Module):
    """Rounds to steps of the range that it has seen in the batch, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 2)
        self.register_buffer("furthest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        self.furthest = torch.maximum(self.furthest, output.detach().abs().max())
        step = self.furthest / 8
        return output + ((output / step).round() * step - output).detach()


def observed() -> Job:
    return _job(Observed)


def chaotic() -> Job:
    """Doubles each bit of rounding in each of 60 iterations."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        value = output.sigmoid()
        for _ in range(60):
            value = 3.99 * value * (1 - value)
        return F.cross_entropy(value, batch.targets)

    return _job(_mlp, criterion)


def untrained() -> Job:
    """Its loss depends on no weight."""
    return _job(_mlp, lambda output, batch: F.cross_entropy(output, batch.targets) * 0.0)


def masked_tokens() -> Job:
    """A mean over the tokens that are masked: none is with the constant that replaces random numbers."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        masked = torch.rand(len(output), 8) < 0.3
        return F.cross_entropy(output, batch.targets, reduction="none")[:, None].expand(-1, 8)[masked].mean()

    return _job(_mlp, criterion)


class OwnGenerator(nn.Module):
    """Draws from a generator that no seed of a step reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(20, 2), torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * torch.rand(x.shape, generator=self.generator).to(x))  # type: ignore[no-any-return]


def own_generator() -> Job:
    return _job(OwnGenerator)


def mixup() -> Job:
    """Mixes the rows of a batch, in collate."""

    def collate(samples: list[Any]) -> Any:
        inputs, targets = (torch.stack(each) for each in zip(*samples))
        return inputs + 0.1 * inputs[torch.randperm(len(inputs))], targets

    return _job(_mlp, collate=collate)


def mixup_sum() -> Job:
    return replace(mixup(), criterion=lambda output, batch: F.cross_entropy(output, batch.targets, reduction="sum"))


def masked_by_collate() -> Job:
    """Targets of one in three positions, drawn for a whole batch, as by Hugging Face's collator."""

    def collate(samples: list[Any]) -> Any:
        inputs, targets = (torch.stack(each) for each in zip(*samples))
        masked = torch.bernoulli(torch.full((len(inputs), 8), 0.4)).bool()
        return inputs, torch.where(masked, targets[:, None].expand(-1, 8), -100)

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output.repeat_interleave(8, 0), batch.targets.flatten())

    return _job(_mlp, criterion, collate=collate)


def gamma() -> Job:
    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output * torch._standard_gamma(torch.ones(len(output), 1)), batch.targets)

    return _job(_mlp, criterion)


def rows_mixed_by_draws() -> Job:
    """Mixes each row with the one that a draw of its own batch puts in its place."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output + 0.2 * output[torch.rand(len(output)).argsort()], batch.targets)

    return _job(_mlp, criterion)


class Averaging(nn.Module):
    """Keeps statistics that only its evaluation uses. kind: of InstanceNorm, BatchNorm, or a count of its rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.last = kind, nn.Linear(20, 16), nn.Linear(16, 2)
        self.norm = nn.BatchNorm1d(16) if kind == "batch" else nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if self.kind == "instance":
            hidden = self.norm(hidden.view(-1, 4, 4)).flatten(1)
        elif self.kind == "batch" and self.training:
            self.norm(hidden.detach())
        elif self.kind == "batch":
            hidden = self.norm(hidden)
        elif self.training:
            self.rows += len(x)
        return self.last(hidden.relu())  # type: ignore[no-any-return]


def running_statistics() -> Job:
    return _job(lambda: Averaging("instance"), evaluation=TensorDataset(X, Y))


def batch_norm_of_evaluation() -> Job:
    return _job(lambda: Averaging("batch"), evaluation=TensorDataset(X, Y))


def counts_rows() -> Job:
    return _job(lambda: Averaging("count"))


def few_padded() -> Job:
    """A mean over tokens, of which five rows of 1,200 have fewer, none of them evenly spaced."""
    inputs = torch.randn(1200, 20, generator=torch.Generator().manual_seed(3))
    targets = torch.ones(1200, 8, dtype=torch.int64)
    targets[[17, 333, 517, 791, 1013], 3:] = 0
    return _job(_mlp, _token_mean, train=TensorDataset(inputs, targets))


LIBRARY = torch.library.Library("separable", "FRAGMENT")
if not hasattr(torch.ops.separable, "scales"):  # the file is imported more than once in a process
    LIBRARY.define("scales(Tensor rows) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    LIBRARY.impl("scales", lambda rows: 1 + torch.rand(len(rows), 1).to(rows), "CompositeExplicitAutograd")


def unheld(output: Tensor) -> Tensor:
    """Draws by an operation that no table of the proof has."""
    return torch.ops.separable.scales(output.detach())  # type: ignore[no-any-return]


def unknown_random_numbers() -> Job:
    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output * unheld(output), batch.targets)

    return _job(_mlp, criterion)
