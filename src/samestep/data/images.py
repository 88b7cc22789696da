"""Images in class folders: listed once, decoded when asked for, a broken one named by its path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from samestep.errors import UserError

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"}
Pixels = NDArray[np.uint8]  # [height, width, 3]


class ImageFolder(Dataset[Any]):
    """`folder/CLASS/*.jpg` as (image, label); labels number the class folders in the order of their names.

    transform: of the pixels; None gives them as they are, for a job's `augment` to crop. classes: to insist on; the
    folder's own where None. Raises UserError for a folder without images, and for an image that cannot be read.
    """

    def __init__(
        self, folder: Path, transform: Callable[[Pixels], Any] | None = None, classes: list[str] | None = None
    ) -> None:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give one that holds a folder of images for each class")
        found = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if classes is not None and found != classes:
            odd = sorted({*found} ^ {*classes})
            raise UserError(f"{folder} does not hold the training's classes: {', '.join(odd[:5])} is in one alone")
        self.classes, self.transform = found, transform
        self.paths = [
            (path, label)
            for label, name in enumerate(found)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.paths:
            raise UserError(f"{folder} holds no images; put them in a folder for each class, as in {folder}/cat/1.jpg")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.paths[index]
        pixels = decode(path)
        return (self.transform(pixels) if self.transform else pixels), label


def decode(path: Path) -> Pixels:
    """An image file's pixels [height, width, 3]. Raises UserError, with its path, when it is no image."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's own, for what is broken
        raise UserError(f"{path} cannot be read as an image ({error}); mend or remove it") from error


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Bilinear, with the antialiasing that makes small images look like the large ones."""
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


def center_crop(pixels: Pixels, size: int, short_side: int) -> Pixels:
    """The shorter side scaled to `short_side`, then the middle [size, size, 3]."""
    height, width = pixels.shape[:2]
    scale = short_side / min(height, width)
    pixels = resized(pixels, max(size, round(height * scale)), max(size, round(width * scale)))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


def random_resized_crop(pixels: Pixels, size: int, generator: torch.Generator) -> Pixels:
    """A part of 8 % to 100 % of the area, 3:4 to 4:3 in shape, scaled to [size, size, 3].

    Source: C. Szegedy et al., "Going Deeper with Convolutions", 2014; torchvision's RandomResizedCrop.
    """
    height, width = pixels.shape[:2]
    for _ in range(10):
        area = height * width * (0.08 + 0.92 * _uniform(generator))
        shape = float(np.exp(np.log(3 / 4) + (np.log(4 / 3) - np.log(3 / 4)) * _uniform(generator)))
        w, h = round((area * shape) ** 0.5), round((area / shape) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            top, left = int((height - h + 1) * _uniform(generator)), int((width - w + 1) * _uniform(generator))
            return resized(pixels[top : top + h, left : left + w], size, size)
    return center_crop(pixels, size, size)


def padded_crop(pixels: Pixels, padding: int, generator: torch.Generator) -> Pixels:
    """Zeros around the image, then a part of its own size from anywhere in it."""
    height, width = pixels.shape[:2]
    wide = np.pad(pixels, ((padding, padding), (padding, padding), (0, 0)))
    top, left = (int((2 * padding + 1) * _uniform(generator)) for _ in range(2))
    return wide[top : top + height, left : left + width]


def flipped(pixels: Pixels, generator: torch.Generator) -> Pixels:
    """Mirrored left to right, one time in two."""
    return pixels[:, ::-1] if _uniform(generator) < 0.5 else pixels


def normalised(pixels: Pixels, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """[height, width, 3] in 0..255 -> [3, height, width], float32, zero mean and unit variance over the data."""
    scaled = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).float() / 255
    return (scaled - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator))
