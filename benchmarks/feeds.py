"""The arms of input.py: the same rows by our loader and by torch's DataLoader as tutorials write it, block by block.

Nothing is trained here but in `trained`: an arm's consumer only takes batches, and a float of each, ready for a model.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from arms import machine
from samestep import Job, Recipe
from samestep.data.images import ImageFolder, Pixels, flipped, padded_crop
from samestep.data.loader import batches
from samestep.data.schedule import schedule_of
from samestep.engines import single
from samestep.report.figures.data_wait import measured
from samestep.training import Run
from samestep.world import World
from samestep.world.processes import die_with_parent

BATCH = 64  # rows of a batch, per rank
DRAINED = 16  # batches at the start of a block that are not timed: more than any arm has ready from its pause
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # CIFAR-10's
ROWS = 12_000


def in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> TensorDataset:
    """Random rows in `shape`, and labels."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset((100 * torch.rand(ROWS, *shape, generator=generator)).to(dtype), torch.arange(ROWS) % 10)


class TutorialImages(Dataset[Any]):
    """Decode, pad, crop, flip, to float, normalise: sample by sample, with Pillow and torch, as tutorials do."""

    def __init__(self, folder: Path) -> None:
        self.paths = ImageFolder(folder).paths
        self.mean, self.std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.paths[index]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        wide = ImageOps.expand(image, 4)
        left, top = random.randint(0, 8), random.randint(0, 8)
        image = wide.crop((left, top, left + image.width, top + image.height))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (pixels - self.mean) / self.std, label


def augment(sample: tuple[Pixels, int], generator: torch.Generator) -> tuple[Pixels, int]:
    pixels, label = sample
    return flipped(padded_crop(pixels, 4, generator), generator), label


class Normalised(nn.Module):
    """uint8 [rows, h, w, 3] -> float [rows, 3, h, w], zero mean and unit variance: a whole batch at once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("scale", 1 / (255 * torch.tensor(STD).view(3, 1, 1)), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        # Contiguous first, while it is bytes: half the time of the same operations in another order.
        floats = pixels.permute(0, 3, 1, 2).contiguous().to(self.mean.dtype)
        return floats.sub_(self.mean).mul_(self.scale)  # type: ignore[arg-type]


def a_job(data: Any, world: World, workers: int, width: int = 8, epochs: int = 1) -> Job:
    """A job on `data`; images in folders are cropped and flipped."""
    folders = isinstance(data, ImageFolder)

    def model() -> nn.Module:
        torch.manual_seed(0)
        first = nn.Conv2d(3, width, 3, padding=1)
        middle = (nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        return nn.Sequential(Normalised() if folders else nn.Identity(), first, *middle, nn.Linear(32 * width, 10))

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": 0.01}),
        train=data,
        augment=augment if folders else None,
        global_batch=BATCH * world.size,
        last="drop",
        epochs=epochs,
        workers=workers,
    )


def samestep(data: Any, world: World, workers: int) -> Iterator[Any]:
    """Our loader, and the operation that a model begins with."""
    job = a_job(data, world, workers)
    normalised = Normalised() if isinstance(data, ImageFolder) else nn.Identity()
    for batch in batches(job, world, schedule_of(job, world.size), 10**9):
        yield normalised(batch.inputs), batch.targets


def dataloader(data: Any, world: World, workers: int) -> Iterator[Any]:
    """torch's DataLoader, its workers kept from epoch to epoch."""
    dataset = TutorialImages(data.folder) if isinstance(data, ImageFolder) else data
    sampler: Any = DistributedSampler(dataset, world.size, world.rank, drop_last=True) if world.size > 1 else None
    loader: Any = DataLoader(
        dataset,
        BATCH,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
        worker_init_fn=die_with_parent if workers else None,
    )
    epoch = 0
    while True:
        if sampler:
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


ARMS = {"samestep": samestep, "dataloader": dataloader, "control": dataloader}  # control: what equal arms read


def sources(images: Path | None) -> dict[str, Any]:
    """What is loaded: name -> a function that opens it."""
    found: dict[str, Any] = {
        "memory, 1x8x8 floats": partial(in_memory, (1, 8, 8), torch.float32),
        "memory, 32x32x3 bytes": partial(in_memory, (32, 32, 3), torch.uint8),
        "memory, 3x32x32 floats": partial(in_memory, (3, 32, 32), torch.float32),
    }
    return found | ({"jpeg folders": partial(_folder, images)} if images else {})


def _folder(images: Path) -> ImageFolder:
    opened = ImageFolder(images)
    opened.folder = images  # type: ignore[attr-defined]  # for the other arm to list it too
    return opened


def loaded(data: Any, world: World, workers: int, rounds: int, block: int) -> dict[str, list[float]]:
    """Seconds that each arm takes for a block of batches, round by round, in an order that changes."""
    feeds = {name: arm(data, world, workers) for name, arm in ARMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in feeds}
    for number in range(rounds + 1):  # the first warms up
        for name in random.Random(number).sample(list(feeds), len(feeds)):
            gc.collect()
            if world.size > 1:
                dist.barrier()
            for _ in range(DRAINED):
                inputs, targets = next(feeds[name])
            assert len(inputs) == len(targets) == BATCH
            assert not isinstance(data, ImageFolder) or (inputs.is_floating_point() and inputs.shape[1] == 3)
            start = time.perf_counter()
            for _ in range(block):
                next(feeds[name])
            if number:
                seconds[name].append(time.perf_counter() - start)
    for feed in feeds.values():
        feed.close()
    return seconds


def trained(data: ImageFolder, workers: int, width: int, steps: int) -> dict[str, Any]:
    """A real training, in one process: the share of its time that it waits, the loader's ceiling and its demand."""
    world = World()
    job = a_job(data, world, workers, width, epochs=10**6)
    run = Run(job, world, steps)
    single.train(job, world, run)
    seen = run.observations()
    assert seen.losses[-1] < seen.losses[0]
    found = measured([seen], BATCH, workers, job.prefetch, os.cpu_count() or 1)
    assert found
    return {
        "width": width,
        "workers": workers,
        "step_s": seen.step_s,
        "wait_s": seen.wait_s,
        "wait_share": found.share,
        "ceiling_in_training": found.loader_ceiling,
        "demand": found.demand,
        "advice": found.advice(),
    }


def rank_main(rank: int, asked: dict[str, Any], folder: str) -> None:
    """The life of one rank; each leaves rankR.json in `folder`. Never returns: gloo's threads may abort in exit."""
    die_with_parent()
    faulthandler.dump_traceback_later(asked["deadline_s"], exit=True)
    torch.set_num_threads(1)
    world = World(rank, asked["ranks"], rank, asked["ranks"])
    if world.size > 1:
        meeting, patience = f"file://{folder}/rendezvous", timedelta(seconds=asked["deadline_s"])
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world.size, timeout=patience)
    found: dict[str, Any] = {"machine": machine(world)}
    opened = sources(asked["images"])
    if asked["what"] == "load":
        data = opened[asked["source"]]()
        found["seconds"] = loaded(data, world, asked["workers"], asked["rounds"], asked["block"])
    else:
        found["training"] = trained(opened["jpeg folders"](), asked["workers"], asked["width"], asked["steps"])
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    if world.size > 1:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
