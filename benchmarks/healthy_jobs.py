"""Draws healthy jobs of many shapes, and runs `samestep verify` with every engine on each: none may be told to differ.

    python benchmarks/healthy_jobs.py [--jobs 48] [--out FOLDER] [--only WORDS]

Job number n has the n-th model, the n-th optimizer and other settings in turn, and runs at 2 or at 3 ranks. A row of
rows.json is one engine's verdict; with --out the benchmark goes on where it was cut off. Exit 1 where a row says
`differs` or `failed`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from samestep import Batch, Job, LRSchedule, Recipe

TOKENS, LENGTH, WIDTH, CLASSES = 17, 6, 12, 4


class Sequences(nn.Module):
    """An embedding, a layer over the sequence, and a classifier of its mean. shape [N, LENGTH] -> [N, CLASSES]"""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(TOKENS, WIDTH), layer, nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layer(self.embedding(tokens))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal self-attention with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.projected = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (3, WIDTH // 3)).transpose(1, 2)
            for part in self.projected(self.norm(hidden)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + attended.transpose(1, 2).flatten(2)


class Experts(nn.Module):
    """A mixture of all experts, weighed by a router."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(experts))

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.router(hidden).softmax(-1)
        return sum(weights[..., n, None] * expert(hidden) for n, expert in enumerate(self.experts))  # type: ignore[return-value]


class Checkpointed(nn.Module):
    """Dropout inside of activation checkpointing, whose second forward pass must draw the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.block, hidden, use_reentrant=False)  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One block that is called three times, and a scale that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor([0.7]))

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(3):
            hidden = hidden + self.scale * torch.tanh(self.block(hidden))
        return hidden


class TiedHead(nn.Module):
    """The output layer is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(TOKENS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(tokens))[0].mean(1))[:, :CLASSES]  # type: ignore[no-any-return]


class Numbered(nn.Module):
    """A temperature with no dimension, as CLIP has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = Sequences(Attention()), nn.Parameter(torch.tensor(0.3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens) * self.temperature.exp()  # type: ignore[no-any-return]


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 24, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def convolution() -> nn.Module:
    layers = [nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.PReLU(WIDTH)]
    return nn.Sequential(Swapped(), *layers, nn.GroupNorm(3, WIDTH), Swapped())


class Swapped(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.transpose(1, 2)


MODELS = {
    "lstm": lambda: Sequences(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "gru of two layers, dropout": lambda: Sequences(nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)),
    "attention": lambda: Sequences(Attention()),
    "mixture of experts": lambda: Sequences(Experts()),
    "spectral norm": lambda: Sequences(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "weight norm": lambda: Sequences(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "tied head": TiedHead,
    "number as parameter": Numbered,
    "shared block": lambda: Sequences(Shared()),
    "checkpointing, dropout": lambda: Sequences(Checkpointed()),
    "transformer, dropout": lambda: Sequences(transformer()),
    "convolution, BatchNorm": lambda: Sequences(convolution()),
    "rms norm": lambda: Sequences(nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU())),
    "orthogonal": lambda: Sequences(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))),
    "bidirectional rnn": lambda: Sequences(nn.RNN(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)),
    "frozen embedding": lambda: _frozen(Sequences(Attention())),
}


def _frozen(model: Sequences) -> nn.Module:
    model.embedding.requires_grad_(False)
    return model


def _matrices(model: nn.Module) -> list[dict[str, object]]:
    return [{"params": [p for p in model.parameters() if p.dim() == 2 and p.requires_grad]}]


def _decayed(model: nn.Module) -> list[dict[str, object]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]


OPTIMIZERS = {
    "SGD": Recipe(torch.optim.SGD, {"lr": 0.1}),
    "SGD nesterov": Recipe(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "Adam": Recipe(torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "AdamW groups": Recipe(torch.optim.AdamW, {"lr": 1e-2}, _decayed),
    "Adamax": Recipe(torch.optim.Adamax, {"lr": 1e-2}),
    "NAdam": Recipe(torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": Recipe(torch.optim.RAdam, {"lr": 1e-2}),
    "Adagrad": Recipe(torch.optim.Adagrad, {"lr": 1e-2}),
    "Adadelta": Recipe(torch.optim.Adadelta, {"lr": 0.5}),
    "Adafactor": Recipe(torch.optim.Adafactor, {"lr": 1e-2}),
    "RMSprop": Recipe(torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "Rprop": Recipe(torch.optim.Rprop, {"lr": 1e-3}),
    "ASGD": Recipe(torch.optim.ASGD, {"lr": 0.05}),
    "LBFGS": Recipe(torch.optim.LBFGS, {"lr": 0.2, "max_iter": 3}),
    "SGD foreach": Recipe(torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "foreach": True}),
}
SCHEDULES = {
    "none": None,
    "cosine": LRSchedule(lambda optimizer: CosineAnnealingLR(optimizer, 40), every="step"),
    "steps": LRSchedule(lambda optimizer: StepLR(optimizer, 1, 0.5), every="epoch"),
    "warm-up": LRSchedule(lambda optimizer: LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 6)), every="step"),
    "one cycle": LRSchedule(lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=4000), every="step"),
}


def job(
    model: str = "lstm",
    optimizer: str = "SGD",
    schedule: str = "none",
    dtype: str = "float32",
    rows: int = 43,
    global_batch: int = 11,
    micro_batch: int = 0,
    clip_norm: float = 0.0,
    ema: float = 0.0,
    weighted: bool = False,
    compiled: bool = False,
    seed: int = 0,
) -> Job:
    """Returns a classifier of sequences of these settings."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (rows + 9, LENGTH), generator=generator)
    targets = torch.randint(CLASSES, (rows + 9,), generator=generator)
    weights = 0.5 + torch.rand(rows + 9, generator=generator, dtype=torch.float64)

    def network() -> nn.Module:
        torch.manual_seed(seed + 1)
        made = MODELS[model]().to(getattr(torch, dtype))
        return torch.compile(made) if compiled else made  # type: ignore[return-value]

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        losses = F.cross_entropy(output, batch.data[1], reduction="none", label_smoothing=0.1)
        row_weights = batch.data[2].to(losses)
        return (losses * row_weights).sum() / row_weights.sum() if weighted else losses.mean()

    data = TensorDataset(tokens, targets, weights)
    return Job(
        model=network,
        criterion=criterion,
        forward=lambda network, batch: network(batch.data[0]),
        optimizer=OPTIMIZERS[optimizer],
        scheduler=SCHEDULES[schedule],
        train=TensorDataset(*data[:rows]),
        evaluation=TensorDataset(*data[rows:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.data[1]},
        global_batch=global_batch,
        micro_batch=micro_batch or None,
        clip_norm=clip_norm or None,
        ema=ema or None,
        weight=(lambda index: float(weights[index])) if weighted else None,
        evaluation_weight=(lambda index: float(weights[rows + index])) if weighted else None,
        seed=seed,
        epochs=3,
    )


def settings_of(number: int) -> dict[str, str]:
    """Returns the settings of job `number`: every model and every optimizer in turn, the others drawn."""
    draw = random.Random(number)
    models, optimizers = [*MODELS], [*OPTIMIZERS]
    optimizer = optimizers[(number + number // len(optimizers)) % len(optimizers)]
    return {
        "model": models[number % len(models)],
        "optimizer": optimizer,
        "schedule": draw.choice([*SCHEDULES]),
        "dtype": draw.choice(["float32", "float32", "float64", "bfloat16"]),
        "rows": str(draw.randint(20, 60)),
        "global_batch": str(draw.randint(7, 16)),
        "micro_batch": "0" if optimizer == "LBFGS" else str(draw.choice([0, 0, 2, 3])),
        "clip_norm": str(draw.choice([0.0, 0.0, 0.05, 1.0])),
        "ema": str(draw.choice([0.0, 0.9])),
        "weighted": str(draw.choice([False, True])).lower(),
        "compiled": str(number % 12 == 7).lower(),
        "seed": str(number),
    }


def verified(number: int, settings: dict[str, str]) -> list[dict[str, object]]:
    """Returns each engine's verdict on a job, as the command gives it."""
    size = 2 + number % 2
    with tempfile.TemporaryDirectory(prefix="samestep-healthy-") as name:
        chosen = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
        command = ["verify", f"{Path(__file__).resolve()}:job", "--nproc", str(size), *chosen, "--json"]
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "samestep", *command, "--out", f"{name}/out"],
            cwd=name,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
    row = {"job": number, "ranks": size, "settings": settings, "exit_code": ended.returncode, "seconds": seconds}
    if not ended.stdout.startswith("{"):
        return [
            row | {"engine": None, "verdict": "refused" if ended.returncode == 2 else "failed", "why": ended.stderr}
        ]
    results = json.loads(ended.stdout)
    keys = ("engine", "verdict", "bitwise", "first_divergence", "reason")
    return [
        row | {key: result[key] for key in keys} | {"one_process": results.get("one_process")}
        for result in results["engines"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=48)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="jobs with these words in their settings")
    parser.add_argument("--out", type=Path, help="keep every row in this folder")
    options = parser.parse_args()
    file = options.out / "rows.json" if options.out else None
    rows = json.loads(file.read_text()) if file and file.exists() else []
    done = {row["job"] for row in rows}
    for number in range(options.first, options.first + options.jobs):
        settings = settings_of(number)
        if options.only not in str(settings) or number in done:
            continue
        new = verified(number, settings)
        rows += new
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=1))
        counts = Counter(row["verdict"] for row in new)
        wrong = [row for row in new if row["verdict"] in ("differs", "failed")]
        print(number, f"{new[0]['seconds']:.0f} s", dict(counts), settings["model"], settings["optimizer"], flush=True)
        for row in wrong:
            print("    ", row["engine"], row.get("first_divergence") or row.get("reason") or row.get("why"), flush=True)
        if new[0]["engine"] is None:
            print("    ", new[0]["why"], flush=True)
    counts = Counter(row["verdict"] for row in rows)
    print(f"{len(rows)} runs: {dict(counts)}")
    return 1 if counts["differs"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
