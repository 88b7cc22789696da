"""digits on deepspeed, written by samestep. It trains and saves weights.pt; it does not evaluate. Start it with

python -m torch.distributed.run --nproc-per-node=2 digits_deepspeed.py
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass, field, make_dataclass
from math import ceil
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._pytree import tree_map_only
from torch.utils.data import TensorDataset, default_collate


@dataclass
class Job:
    model: Any
    criterion: Any
    optimizer: Any
    train: Any
    global_batch: Any
    evaluation: Any = None
    forward: Any = lambda model, batch: model(batch.inputs)
    metrics: Any = field(default_factory=dict)
    scheduler: Any = None
    epochs: Any = 1
    seed: Any = 0
    clip_norm: Any = None
    workers: Any = 0


Recipe = make_dataclass("Recipe", ["cls", ("settings", dict, field(default_factory=dict)), ("groups", Any, None)])
LRSchedule = make_dataclass("LRSchedule", ["make", ("every", str, "step")])


@dataclass
class Batch:
    data: Any
    step: int
    micro: int
    share: float  # the mean over this rank's rows, times it, averages over the ranks to the mean over all rows
    halves = property(lambda self: self.data if isinstance(self.data, (list, tuple)) and len(self.data) == 2 else None)
    inputs = property(lambda self: self.halves[0] if self.halves else self.data)
    targets = property(lambda self: self.halves[1] if self.halves else None)


# ---- the job ----

TRAIN_ROWS = 1500


def job(
    global_batch: int = 64,
    lr: float = 0.05,
    epochs: int = 10,
    width: int = 16,
    seed: int = 0,
    workers: int = 0,
) -> Job:
    scans = load_digits()
    images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(scans.target)

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 16, 10),
        )

    def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, epochs * ceil(TRAIN_ROWS / global_batch))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9, "weight_decay": 5e-4}),
        scheduler=LRSchedule(cosine),
        train=TensorDataset(images[:TRAIN_ROWS], labels[:TRAIN_ROWS]),
        evaluation=TensorDataset(images[TRAIN_ROWS:], labels[TRAIN_ROWS:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=global_batch,
        epochs=epochs,
        seed=seed,
        workers=workers,
    )


# ---- its schedule: global batch t is the same rows on any number of ranks ----


def key(*path):
    return int.from_bytes(hashlib.blake2b("/".join(map(str, path)).encode(), digest_size=8).digest(), "big") >> 1


def cut(rows, parts):
    base, extra = divmod(len(rows), parts)
    ends = [base * (i + 1) + min(i + 1, extra) for i in range(parts)]
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def batches(job, world):
    size, step = job.global_batch, 0
    for epoch in range(job.epochs):
        generator = torch.Generator().manual_seed(key(job.seed, "order", epoch))
        order = torch.randperm(len(job.train), generator=generator).tolist()
        for start in range(0, len(order), size):
            whole = order[start : start + size]
            mine = cut(whole, world.size)[world.rank]
            for micro, rows in enumerate([mine]):
                share = len(rows) * world.size / len(whole)
                samples = [job.train[i] for i in rows or (whole * 2)[:2]]  # none of its own: others', times zero
                data = tree_map_only(torch.Tensor, lambda t: t.to(world.device), default_collate(samples))
                yield Batch(data, step, micro, share)
            step += 1


def loss_of(job, world, model, batch):
    torch.manual_seed(key(job.seed, "replica", batch.step, batch.micro, world.rank))  # each replica its own dropout
    loss = job.criterion(job.forward(model, batch), batch)
    if world.rank == 0:
        print(f"step {batch.step}: loss {loss.item():.9g}")
    return loss * batch.share


# ---- the engine: samestep/engines/deepspeed.py ----


def train(job, world):
    os.environ.setdefault("DS_ACCELERATOR", world.device.partition(":")[0])
    import deepspeed

    module = job.model().to(world.device)
    optimizer = job.optimizer.cls(module.parameters(), **job.optimizer.settings)
    scheduler = job.scheduler.make(optimizer)

    def state() -> dict[str, Any]:
        with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=1 == 3):
            return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    micro_batches = 1
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,  # no loader: batches(job, world) has shared out the rows
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,  # for its log alone; our rows are what batches(job, world) gives
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": job.clip_norm or 0.0,  # its default is 1.0
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    for batch in batches(job, world):
        loss = loss_of(job, world, engine, batch)
        engine.backward(loss * micro_batches)  # it divides by their number
        engine.step()  # the optimizer's step at the last micro-batch, and zero_grad
        scheduler.step()
    return state()


def main():
    rank, size, local_rank = (int(os.environ[f"{name}"]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    world = SimpleNamespace(rank=rank, size=size, device=device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    state = train(job(), world)
    if world.rank == 0:
        torch.save(state, "weights.pt")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort about one in three healthy processes in the interpreter's own exit


if __name__ == "__main__":
    main()
