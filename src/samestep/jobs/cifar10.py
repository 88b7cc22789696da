"""cifar10: ResNet-18 for 32x32. A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    samestep run cifar10 --set data=FOLDER --engine ddp --nproc 4

FOLDER is the official python version (data_batch_1 … test_batch), or holds train/CLASS/*.jpg and test/CLASS/*.jpg.
Full scale: the defaults, 300 epochs with a global batch of 128; https://github.com/kuangliu/pytorch-cifar reaches
93.02 % with its own schedule. Small: --set epochs=5 --set width=8 --set lr=0.02 --set workers=1, about two minutes on 2
cores with 10,000 images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import Dataset

from samestep import Job, LRSchedule, Recipe
from samestep.data.images import ImageFolder, Pixels, flipped, padded_crop
from samestep.data.pickled import read_pickled
from samestep.errors import UserError
from samestep.jobs.models.resnet import resnet18

Bad = Literal["fail", "skip"]  # what to do with images that cannot be read
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the 50,000 training images


class InMemory(Dataset[Any]):
    """A dataset of images in one array, uint8 [rows, 32, 32, 3]."""

    def __init__(self, images: Pixels, labels: list[int]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Pixels, int]:
        return self.images[index], self.labels[index]


def official(folder: Path, names: list[str]) -> tuple[Pixels, list[int]]:
    """Reads the pickled batches of the python version. Returns images [rows, 32, 32, 3] and labels."""
    parts = [batch(folder / name) for name in names]
    images = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), [label for _, labels in parts for label in labels]


def batch(path: Path) -> tuple[Pixels, list[int]]:
    """Reads one batch: pixels [rows, 3072] and labels. Nothing in the file is run, whoever has written it."""
    content = read_pickled(path)
    pixels, labels = (content.get(name) if isinstance(content, dict) else None for name in ("data", "labels"))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        raise UserError(f"{path} has no 'data', uint8 [rows, 3072]; give CIFAR-10's python version")
    if not isinstance(labels, list) or len(labels) != len(pixels) or any(label not in range(10) for label in labels):
        raise UserError(f"{path} has no 'labels', 0 to 9 for each row; give CIFAR-10's python version")
    return pixels, [*map(int, labels)]


def datasets(data: Path, limit: int, bad: Bad) -> tuple[Any, Any]:
    """Returns the training dataset, at most `limit` images (0: all), and the test dataset. Pixels are in 0..255."""
    if (data / "data_batch_1").exists():
        train: Any = InMemory(*official(data, [f"data_batch_{number}" for number in range(1, 6)]))
        test: Any = InMemory(*official(data, ["test_batch"]))
    elif (data / "train").is_dir():
        train = ImageFolder(data / "train", bad=bad)
        test = ImageFolder(data / "test", classes=train.classes, bad=bad)
        if len(train.classes) != 10:
            raise UserError(f"{data / 'train'} has {len(train.classes)} classes, not 10; imagefolder takes any number")
    else:
        raise UserError(f"{data} holds neither data_batch_1 nor train/; name CIFAR-10's folder: --set data=FOLDER")
    if limit < 0:
        raise UserError(f"limit is {limit}; give how many images to train on, 0 for all")
    if limit:
        chosen = torch.randperm(len(train), generator=Generator().manual_seed(0))[:limit].tolist()
        train = torch.utils.data.Subset(train, chosen)
    return train, test


def augment(sample: tuple[Pixels, int], generator: Generator) -> tuple[Pixels, int]:
    pixels, label = sample
    return flipped(padded_crop(pixels, 4, generator), generator), label


def job(
    data: Path = Path("cifar-10-batches-py"),
    global_batch: int = 128,
    lr: float = 0.1,
    epochs: int = 300,
    width: int = 64,
    norm: Literal["batch", "group"] = "batch",
    limit: int = 0,
    bad: Bad = "fail",
    seed: int = 0,
    workers: int = 2,
) -> Job:
    train, test = datasets(data, limit, bad)

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return resnet18(10, width=width, small=True, norm=norm, mean=MEAN, std=STD)

    return Job(
        model=model,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9, "weight_decay": 5e-4}),
        scheduler=LRSchedule(lambda optimizer: MultiStepLR(optimizer, [150, 250]), every="epoch"),
        train=train,
        augment=augment,
        evaluation=test,
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=global_batch,
        epochs=epochs,
        seed=seed,
        workers=workers,
    )
