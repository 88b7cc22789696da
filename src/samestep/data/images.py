"""ImageFolder, a dataset of images in class folders, and the crops and flips that augment them.

Pixels stay uint8 [height, width, 3]: a quarter of the bytes that floats would take on the way from loader workers. The
model normalises a whole batch in one operation. All functions return new, contiguous arrays.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from samestep.errors import UserError
from samestep.world.regular_files import check_regular, read_regular

JPEG = {".jpg", ".jpeg"}
SUFFIXES = {*JPEG, ".png", ".bmp", ".webp", ".ppm"}
Pixels = NDArray[np.uint8]  # [height, width, 3]


class ImageFolder(Dataset[Any]):
    """The images in `folder/CLASS/*.jpg` as (image, label); labels number the class folders in alphabetical order.

    transform: applied to the pixels to get the image; None returns the pixels, for a job's `augment` to crop.
    classes: the class names that the folder must have; None: any.
    bad: what to do with images that cannot be read. 'fail': raise UserError with the path when such an image is loaded.
        'skip': read all images once at the start, on every rank, and leave the broken ones out. `skipped` lists their
        paths, a warning counts them, and the schedule covers the rest, each once an epoch.
    short_side: see decode().
    Raises UserError for a folder without images, or with other classes than `classes`.
    """

    def __init__(
        self,
        folder: Path | str,
        transform: Callable[[Pixels], Any] | None = None,
        classes: list[str] | None = None,
        *,
        bad: Literal["fail", "skip"] = "fail",
        short_side: int | None = None,
    ) -> None:
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give one that holds a folder of images for each class")
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        if classes is not None and names != classes:
            differing = sorted({*names} ^ {*classes})
            raise UserError(
                f"{folder} does not hold the training's classes: {', '.join(differing[:5])} is in one alone"
            )
        self.classes, self.transform, self.short_side = names, transform, short_side
        self.paths = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if empty := self._empty_classes():
            raise UserError(f"{folder / empty[0]} holds no images; remove it, or fill it: it would be a class")
        self.skipped: list[Path] = []
        if bad == "skip":
            self._skip_broken(folder)
        if not self.paths:
            raise UserError(f"{folder} holds no images; put them in a folder for each class, as in {folder}/cat/1.jpg")

    def _empty_classes(self) -> list[str]:
        filled = {label for _, label in self.paths}
        return [name for label, name in enumerate(self.classes) if label not in filled]

    def _skip_broken(self, folder: Path) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow releases the GIL while it decodes
            readable = list(threads.map(_can_be_read, (path for path, _ in self.paths)))
        self.skipped = [path for (path, _), fine in zip(self.paths, readable) if not fine]
        self.paths = [entry for entry, fine in zip(self.paths, readable) if fine]
        if self.skipped:
            some = ", ".join(str(path.relative_to(folder)) for path in self.skipped[:3])
            if self.paths and (empty := self._empty_classes()):
                raise UserError(f"{folder / empty[0]} holds no image that can be read; replace or remove it")
            warnings.warn(
                f"left out {len(self.skipped)} of the {len(readable)} images of {folder}, which cannot be read: {some}"
                + (", …" if len(self.skipped) > 3 else ""),
                stacklevel=3,
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.paths[index]
        pixels = decode(path, self.short_side)
        return (self.transform(pixels) if self.transform else pixels), label


def decode(path: Path, short_side: int | None = None) -> Pixels:
    """Reads an image file. Returns its pixels, uint8 [height, width, 3].

    short_side: decode a JPEG at 1/8, 1/4 or 1/2 of its size, which is several times faster, if its shorter side keeps
    at least this many pixels. Source: Pillow's Image.draft. Raises UserError with the path when the file is no image.
    """
    if short_side is None and path.suffix.lower() in JPEG:
        with contextlib.suppress(OSError, ValueError):  # if it fails, Pillow reads the file or says what is wrong
            file = read_regular(path)
            height, width, colours, _ = simplejpeg.decode_jpeg_header(file)
            # For other colour spaces simplejpeg and Pillow return different pixels; Pillow refuses what is too large.
            if colours in ("YCbCr", "Gray", "RGB") and height * width < (Image.MAX_IMAGE_PIXELS or math.inf):
                pixels: Pixels = simplejpeg.decode_jpeg(file, "RGB")
                return pixels
    try:
        check_regular(path)
        with Image.open(path) as image:
            if short_side is not None:
                image.draft("RGB", (short_side, short_side))
            return np.array(image if image.mode == "RGB" else image.convert("RGB"))
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:  # what Pillow raises for broken files
        raise UserError(
            f"{path} cannot be read as an image ({error}); replace or remove it, or leave out what is broken: "
            "bad='skip'"
        ) from error


def _can_be_read(path: Path) -> bool:
    try:
        decode(path)
    except UserError:
        return False
    return True


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resizes pixels to [height, width, 3], bilinear with antialiasing."""
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


def center_crop(pixels: Pixels, size: int, short_side: int) -> Pixels:
    """Scales the shorter side to `short_side` and crops the center. Returns [size, size, 3]."""
    height, width = pixels.shape[:2]
    if min(height, width) != short_side or short_side < size:
        scale = short_side / min(height, width)
        pixels = resized(pixels, max(size, round(height * scale)), max(size, round(width * scale)))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return np.ascontiguousarray(pixels[top : top + size, left : left + size])


def random_resized_crop(pixels: Pixels, size: int, generator: torch.Generator) -> Pixels:
    """Crops 8 % to 100 % of the area with an aspect ratio of 3:4 to 4:3, and scales it to [size, size, 3].

    Source: C. Szegedy et al., "Going Deeper with Convolutions", 2014; torchvision's RandomResizedCrop.
    """
    height, width = pixels.shape[:2]
    for _ in range(10):
        of_area, of_shape, of_height, of_width = _random_numbers(4, generator)
        area = height * width * (0.08 + 0.92 * of_area)
        shape = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * of_shape)
        w, h = round((area * shape) ** 0.5), round((area / shape) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            top, left = int((height - h + 1) * of_height), int((width - w + 1) * of_width)
            return resized(pixels[top : top + h, left : left + w], size, size)
    return center_crop(pixels, size, size)


def padded_crop(pixels: Pixels, padding: int, generator: torch.Generator) -> Pixels:
    """Pads the image with zeros, then crops the original size at a random position. Returns [height, width, 3]."""
    height, width = pixels.shape[:2]
    down, right = (int((2 * padding + 1) * number) - padding for number in _random_numbers(2, generator))
    crop = np.zeros_like(pixels)  # the crop is copied directly, without building the padded image
    crop[max(0, -down) : max(0, height - down), max(0, -right) : max(0, width - right)] = pixels[
        max(0, down) : max(0, height + down), max(0, right) : max(0, width + right)
    ]
    return crop


def flipped(pixels: Pixels, generator: torch.Generator) -> Pixels:
    """Flips the pixels left to right with probability 0.5."""
    return np.ascontiguousarray(pixels[:, ::-1]) if _random_numbers(1, generator)[0] < 0.5 else pixels


def _random_numbers(count: int, generator: torch.Generator) -> list[float]:
    """Draws `count` numbers from [0, 1) in one call, because each call costs some microseconds."""
    numbers: list[float] = torch.rand(count, generator=generator).tolist()
    return numbers
