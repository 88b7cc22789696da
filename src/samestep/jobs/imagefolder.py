"""imagefolder: ResNet-18 or -50 on class folders of images, as ImageNet has them.

    samestep run imagefolder --set data=FOLDER --set model=resnet50 --engine ddp --nproc 8

FOLDER holds train/CLASS/*.jpg, and val/CLASS/*.jpg or test/CLASS/*.jpg. Full scale: the defaults, 90 epochs of 256 at
lr 0.1, divided by 10 every 30 epochs. torchvision reaches 69.76 % top-1 for resnet18 and 76.13 % for resnet50 on
ImageNet-1k (https://docs.pytorch.org/vision/stable/models.html, weights IMAGENET1K_V1).
Small: --set epochs=5 --set size=32 --set width=8 --set lr=0.02 --set workers=1, about two minutes on 2 cores with
10,000 small images.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from samestep import Batch, Job, LRSchedule, Recipe
from samestep.data.images import ImageFolder, Pixels, center_crop, flipped, random_resized_crop
from samestep.jobs.models.resnet import resnet18, resnet50


def augmented(sample: tuple[Pixels, int], generator: Generator, size: int) -> tuple[Pixels, int]:
    pixels, label = sample
    return flipped(random_resized_crop(pixels, size, generator), generator), label


def prepared(pixels: Pixels, size: int) -> Pixels:
    return center_crop(pixels, size, size * 256 // 224)


def top_k(best: int, output: Tensor, batch: Batch) -> Tensor:
    """Returns whether each label is among the `best` most probable classes. shape [rows], bool"""
    hits: Tensor = output.topk(min(best, output.shape[1])).indices == batch.targets[:, None]
    return hits.any(1)


def job(
    data: Path = Path("imagenet"),
    model: Literal["resnet18", "resnet50"] = "resnet18",
    global_batch: int = 256,
    lr: float = 0.1,
    epochs: int = 90,
    size: int = 224,
    width: int = 64,
    norm: Literal["batch", "group"] = "batch",
    bad: Literal["fail", "skip"] = "fail",
    micro_batch: int | None = None,
    seed: int = 0,
    workers: int = 8,
) -> Job:
    train = ImageFolder(data / "train", bad=bad)
    held_out = data / "val" if (data / "val").is_dir() else data / "test"
    network = {"resnet18": resnet18, "resnet50": resnet50}[model]

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return network(len(train.classes), width=width, small=size <= 64, norm=norm)

    return Job(
        model=build,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9, "weight_decay": 1e-4}),
        scheduler=LRSchedule(lambda optimizer: StepLR(optimizer, 30, 0.1), every="epoch"),
        train=train,
        augment=partial(augmented, size=size),
        evaluation=ImageFolder(held_out, partial(prepared, size=size), train.classes, bad=bad),
        metrics={"top1": partial(top_k, 1), "top5": partial(top_k, 5)},
        global_batch=global_batch,
        micro_batch=micro_batch,
        epochs=epochs,
        seed=seed,
        workers=workers,
    )
