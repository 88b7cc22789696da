"""The five jobs on which faults are planted. Small, uneven, and each with what the others lack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from mutations.mixture import Experts
from mutations.reading import arrays, one_by_one, windows  # noqa: F401
from samestep import Batch, Job, Lanes, LRSchedule, Phase, Recipe
from samestep.data.stream import Stream


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _decay(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda count: 0.9**count)


def conv(rows: int = 45, global_batch: int = 10) -> Job:
    """Convolution, BatchNorm and dropout; an uneven last batch; the rate moves every step."""
    images = torch.randn(rows + 17, 2, 6, 6, generator=_random(1))
    labels = torch.randint(4, (rows + 17,), generator=_random(2))

    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(6 * 36, 4),
        )

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
        scheduler=LRSchedule(_decay, every="step"),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        train=TensorDataset(images[17:], labels[17:]),
        evaluation=TensorDataset(images[:17], labels[:17]),
        global_batch=global_batch,
        epochs=2,
    )


def averaged(rows: int = 45, global_batch: int = 10) -> Job:
    """As conv, with averaged weights, which are evaluated and saved."""
    return replace(conv(rows, global_batch), ema=0.7)


class Tied(nn.Module):
    """Predicts a token from the mean of others; the embedding is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.output = nn.Linear(8, 11)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.embedding(tokens).mean(1)))
        return self.output(hidden)  # type: ignore[no-any-return]


def _decayed_and_not(model: nn.Module) -> list[dict[str, object]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]


def tied(rows: int = 45, global_batch: int = 10) -> Job:
    """Tied weights, AdamW with parameter groups, and a clipping that acts at every step."""
    tokens = torch.randint(11, (rows + 13, 5), generator=_random(4))
    targets = torch.randint(11, (rows + 13,), generator=_random(5))

    def model() -> nn.Module:
        torch.manual_seed(6)
        return Tied()

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}, _decayed_and_not),
        clip_norm=0.05,
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        train=TensorDataset(tokens[13:], targets[13:]),
        evaluation=TensorDataset(tokens[:13], targets[:13]),
        global_batch=global_batch,
        epochs=2,
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(16, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.encoder(self.embedding(tokens)))  # type: ignore[no-any-return]


def transformer(rows: int = 45, global_batch: int = 10) -> Job:
    """A small transformer with dropout, micro-batches, and a rate that moves every epoch."""
    tokens = torch.randint(13, (rows + 13, 7), generator=_random(7))

    def model() -> nn.Module:
        torch.manual_seed(8)
        return Transformer()

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3, "betas": (0.8, 0.95)}),
        scheduler=LRSchedule(_decay, every="epoch"),
        metrics={"accuracy": lambda output, batch: (output.argmax(-1) == batch.targets).double().mean(1)},
        train=TensorDataset(tokens[13:], tokens[13:].roll(1, 1)),
        evaluation=TensorDataset(tokens[:13], tokens[:13].roll(1, 1)),
        global_batch=global_batch,
        micro_batch=2,
        epochs=2,
    )


class Sentences(Dataset[dict[str, Tensor]]):
    """Sequences of unequal lengths, read one by one."""

    def __init__(self, rows: int, seed: int) -> None:
        self.lengths = torch.randint(2, 9, (rows,), generator=_random(seed)).tolist()
        self.tokens = torch.randint(1, 13, (rows, 9), generator=_random(seed + 1))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index, : self.lengths[index]], "scale": torch.tensor(1.0 + index % 3)}


def _padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True)
    return {"tokens": tokens, "scale": torch.stack([s["scale"] for s in samples])}


def _masked(sample: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    keep = torch.rand(len(sample["tokens"]), generator=generator) > 0.2
    return sample | {"tokens": sample["tokens"] * keep, "scale": sample["scale"] * (1 + keep.float().mean())}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8, padding_idx=0)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.output = nn.Linear(8, 13)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        return self.output(self.recurrent(self.embedding(tokens))[0] * scale[:, None, None])  # type: ignore[no-any-return]


def _per_token(output: Tensor, batch: Batch) -> Tensor:
    tokens = batch.data["tokens"]
    losses = F.cross_entropy(output.flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)
    return (losses * (tokens > 0)).sum() / batch.data["count"].sum()


def _counted(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    counts = torch.tensor([float(len(s["tokens"])) for s in samples])
    return _padded(samples) | {"count": counts}


def sentences(rows: int = 45, global_batch: int = 10, workers: int = 0) -> Job:
    """Sequences of unequal lengths in dicts, padded by a collate, masked at random, weighed by their tokens."""

    def model() -> nn.Module:
        torch.manual_seed(9)
        return Recurrent()

    train, evaluation = Sentences(rows, 20), Sentences(13, 30)
    return Job(
        model=model,
        forward=lambda network, batch: network(batch.data["tokens"], batch.data["scale"]),
        criterion=_per_token,
        optimizer=Recipe(torch.optim.Adam, {"lr": 1e-2}),
        metrics={"tokens": lambda output, batch: (batch.data["tokens"] > 0).sum(1)},
        train=train,
        evaluation=evaluation,
        collate=_counted,
        augment=_masked,
        weight=lambda index: float(train.lengths[index]),
        evaluation_weight=lambda index: float(evaluation.lengths[index]),
        global_batch=global_batch,
        epochs=2,
        workers=workers,
    )


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """Rows without an end, others in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = _random(40 + self.epoch)
        while True:
            inputs = torch.randn(6, generator=generator)
            yield inputs, inputs.abs().argmax() % 3


def stream(rows: int = 45, global_batch: int = 10) -> Job:
    """What is read from its beginning, in its own order, which an epoch changes."""

    def model() -> nn.Module:
        torch.manual_seed(10)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        train=Stream(Endless(), rows),
        evaluation=Stream(Endless(), 13),
        shuffle=False,
        global_batch=global_batch,
        epochs=2,
    )


def _linear() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _points(rows: int) -> TensorDataset:
    inputs = torch.randn(rows, 6, generator=_random(12))
    return TensorDataset(inputs, inputs.abs().argmax(1) % 3)


def warming(rows: int = 45, global_batch: int = 10) -> Job:
    """Averaged weights, momentum, and a warm-up at every step."""
    return Job(
        model=_linear,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        scheduler=LRSchedule(lambda optimizer: LambdaLR(optimizer, lambda count: (count + 1) / 20)),
        ema=0.9,
        train=_points(rows),
        global_batch=global_batch,
        epochs=2,
    )


class Carrying(nn.Module):
    """A GRU's cell, whose hidden state its rows carry on. shapes: [N, 6], [N, 8] -> [N, 3], [N, 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden: Tensor = self.cell(inputs, state)
        return self.head(hidden), hidden


def _recurrent() -> nn.Module:
    torch.manual_seed(13)
    return Carrying()


def carrying(rows: int = 50, global_batch: int = 10) -> Job:
    """A hidden state that goes from each row to the one in its place of the next step."""
    return Job(
        model=_recurrent,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        forward=lambda model, batch: model(batch.inputs, batch.state),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.1}),
        carry_state=True,
        order=Lanes(),
        last="drop",
        train=_points(rows),
        global_batch=global_batch,
        epochs=2,
    )


def closure(rows: int = 45, global_batch: int = 10) -> Job:
    """LBFGS, whose closure computes the gradient again within a step."""
    return Job(
        model=_linear,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.LBFGS, {"lr": 0.1, "max_iter": 3}),
        train=_points(rows),
        global_batch=global_batch,
        epochs=2,
    )


def phases(rows: int = 45, global_batch: int = 10) -> Job:
    """Two optimizers in turn, and a rate that moves after both."""
    criterion = lambda output, batch: F.cross_entropy(output, batch.targets)  # noqa: E731
    return Job(
        model=_linear,
        criterion=None,
        optimizer=None,
        phases=[
            Phase("first", "0", criterion=criterion, optimizer=Recipe(torch.optim.SGD, {"lr": 0.1})),
            Phase("second", "2", criterion=criterion, optimizer=Recipe(torch.optim.SGD, {"lr": 0.05})),
        ],
        scheduler=LRSchedule(_decay, every="step"),
        train=_points(rows),
        global_batch=global_batch,
        epochs=2,
    )


def _masks(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Masks words at random, as a collator for masked language modelling does."""
    tokens = torch.stack(samples)
    masked = torch.rand(tokens.shape) < 0.3
    return tokens.masked_fill(masked, 0), torch.where(masked, tokens, -100)


def _unmasked(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Masks the words that are divisible by 3: an evaluation draws nothing."""
    tokens = torch.stack(samples)
    masked = tokens % 3 == 0
    return tokens.masked_fill(masked, 0), torch.where(masked, tokens, -100)


class Tokens(Dataset[Tensor]):
    def __init__(self, rows: int, seed: int) -> None:
        self.tokens = torch.randint(1, 13, (rows, 7), generator=_random(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def _mean_of_masked(output: Tensor, batch: Batch) -> Tensor:
    losses = F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    return losses / (batch.targets != -100).sum().clamp(min=1)


def masked(rows: int = 45, global_batch: int = 10) -> Job:
    """Masked language modelling: each batch says what it weighs; with micro-batches."""

    def model() -> nn.Module:
        torch.manual_seed(11)
        return nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 13))

    return Job(
        model=model,
        criterion=_mean_of_masked,
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-2}),
        train=Tokens(rows, 50),
        evaluation=Tokens(13, 60),
        collate=_masks,
        evaluation_collate=_unmasked,
        batch_weight=lambda batch: (batch.targets != -100).sum(),
        global_batch=global_batch,
        micro_batch=3,
        epochs=2,
    )


def mistaken() -> Job:
    """A job that trains something else than was meant: each row has the target of the row beside it."""
    return replace(tied(), criterion=lambda output, batch: F.cross_entropy(output, batch.targets.roll(1)))


def loosely_clipped() -> Job:
    """A job whose gradients never reach its limit."""
    return replace(tied(), clip_norm=1000.0)


class Attention(nn.Module):
    """Attention whose code takes the number of heads from its tensors, and a gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.query, self.key, self.value, self.project = (nn.Linear(16, 16) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        read = self.norm1(x)
        heads = (layer(read).view(rows, length, -1, 4).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(rows, length, -1)
        x = x + self.drop(self.project(attended))
        read = self.norm2(x)
        return x + self.drop(self.down(F.silu(self.gate(read)) * self.up(read)))  # type: ignore[no-any-return]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(11, 16), nn.ModuleList(Attention() for _ in range(2))
        self.output = nn.Linear(16, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x)  # type: ignore[no-any-return]


def heads(rows: int = 45, global_batch: int = 10) -> Job:
    """Layers that tensor parallel ranks split, beside whole ones: tied weights, norms, dropout; AdamW with groups,
    micro-batches, and a clipping that acts at every step."""
    tokens = torch.randint(11, (rows + 13, 6), generator=_random(14))

    def model() -> nn.Module:
        torch.manual_seed(15)
        return Heads()

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}, _decayed_and_not),
        scheduler=LRSchedule(_decay, every="step"),
        clip_norm=0.05,
        train=TensorDataset(tokens[13:, :-1], tokens[13:, 1:]),
        evaluation=TensorDataset(tokens[:13, :-1], tokens[:13, 1:]),
        global_batch=global_batch,
        micro_batch=3,
        epochs=2,
    )


class Layer(nn.Module):
    """A block with dropout and its own statistics of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x))))) * keep  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Blocks that all read a mask, which is computed from the tokens before them; one has a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(11, 8), nn.ModuleList(Layer() for _ in range(8))
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.blocks[5].up.bias.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, tokens: Tensor) -> Tensor:
        keep, x = (tokens > 0).unsqueeze(-1), self.embedding(tokens)
        for block in self.blocks:
            x = block(x, keep)
        return self.output(x)  # type: ignore[no-any-return]


def deep(rows: int = 45, global_batch: int = 10, ema: float = 0.0) -> Job:
    """As many blocks as a pipeline of four ranks may have stages; tied weights on the first and the last one, dropout
    and BatchNorm in each, and micro-batches of which some have no rows; a clipping that acts at every step."""
    tokens = torch.randint(11, (rows + 13, 6), generator=_random(16))

    def model() -> nn.Module:
        torch.manual_seed(17)
        return Deep()

    return replace(
        heads(),
        model=model,
        train=TensorDataset(tokens[13:, :-1], tokens[13:, 1:]),
        evaluation=TensorDataset(tokens[:13, :-1], tokens[:13, 1:]),
        global_batch=global_batch,
        micro_batch=None,
        ema=ema or None,
    )


class Branching(nn.Module):
    """One of two heads, as the rows decide: a replica may have no gradient of a head that another one has."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[int(x[:, 0].mean() > 0)](self.trunk(x))  # type: ignore[no-any-return]


def _branching() -> nn.Module:
    torch.manual_seed(21)
    return Branching()


def branching(rows: int = 45, global_batch: int = 10) -> Job:
    return replace(warming(rows, global_batch), model=_branching, clip_norm=0.1)


def experts(rows: int = 45, global_batch: int = 10, noise: bool = True) -> Job:
    """As heads, with experts of which each expert parallel rank has some: some get no token of a rank."""
    tokens = torch.randint(11, (rows + 13, 6), generator=_random(18))

    def model() -> nn.Module:
        torch.manual_seed(19)
        return Experts(noise=noise)

    return replace(
        heads(),
        model=model,
        train=TensorDataset(tokens[13:, :-1], tokens[13:, 1:]),
        evaluation=TensorDataset(tokens[:13, :-1], tokens[:13, 1:]),
        global_batch=global_batch,
    )


class CausalBlock(nn.Module):
    """Attention to the positions before, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attend, self.project = nn.Linear(16, 48), nn.Linear(16, 16)
        self.feed = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.attend(self.norm1(x))
        rows, length, _ = projected.shape
        heads = (part.view(rows, length, -1, 4).transpose(1, 2) for part in projected.chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(rows, length, -1)
        x = x + self.drop(self.project(attended))
        return x + self.drop(self.feed(self.norm2(x)))  # type: ignore[no-any-return]


class Causal(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(12, 16), nn.Embedding(length, 16)
        self.drop, self.blocks = nn.Dropout(0.1), nn.ModuleList(CausalBlock() for _ in range(2))
        self.output = nn.Linear(16, 12, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embedding(tokens) + self.place(places))
        for block in self.blocks:
            x = block(x)
        return self.output(x)  # type: ignore[no-any-return]


def sequences(rows: int = 45, global_batch: int = 10, length: int = 8) -> Job:
    """Sequences whose positions context parallel ranks divide, with padded ends of uneven lengths, which the loss
    leaves out; query, key and value in one layer; tied weights, dropout in the blocks and before them, micro-batches, a
    clipping that acts at every step.
    """
    tokens = torch.randint(11, (rows + 13, length + 1), generator=_random(16))
    ends = torch.randint(1, length + 1, (rows + 13, 1), generator=_random(17))
    targets = tokens[:, 1:].masked_fill(torch.arange(length) >= ends, -100)

    def model() -> nn.Module:
        torch.manual_seed(18)
        return Causal(length)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-3}, _decayed_and_not),
        scheduler=LRSchedule(_decay, every="step"),
        clip_norm=0.05,
        train=TensorDataset(tokens[13:, :-1], targets[13:]),
        evaluation=TensorDataset(tokens[:13, :-1], targets[:13]),
        global_batch=global_batch,
        micro_batch=3,
        epochs=2,
    )
