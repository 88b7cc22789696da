"""Images in class folders: listed once, decoded when asked for, a broken one named by its path.

Pixels stay uint8 [height, width, 3] all the way: that is a quarter of what floats would be on their way from loader
workers, and a model normalises a whole batch in one operation. All arrays returned here are new and contiguous.
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

JPEG = {".jpg", ".jpeg"}
SUFFIXES = {*JPEG, ".png", ".bmp", ".webp", ".ppm"}
Pixels = NDArray[np.uint8]  # [height, width, 3]


class ImageFolder(Dataset[Any]):
    """`folder/CLASS/*.jpg` as (image, label); labels number the class folders in the order of their names.

    transform: pixels -> what is returned as the image; None gives the pixels, for a job's `augment` to crop.
    classes: to insist on; the folder's own where None.
    bad: what happens to images that cannot be read. 'fail': UserError with the path when one is met. 'skip': all are
        read once at the start, on every rank alike; `skipped` holds the paths that are left out, a warning counts them,
        and the schedule is made of those that remain, so that each of them is still seen once an epoch.
    short_side: as decode's.
    Raises UserError for a folder without images.
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
        found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        if classes is not None and found != classes:
            odd = sorted({*found} ^ {*classes})
            raise UserError(f"{folder} does not hold the training's classes: {', '.join(odd[:5])} is in one alone")
        self.classes, self.transform, self.short_side = found, transform, short_side
        self.paths = [
            (path, label)
            for label, name in enumerate(found)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if empty := self._empty_classes():
            raise UserError(f"{folder / empty[0]} holds no images; remove it, or fill it: it would be a class")
        self.skipped: list[Path] = []
        if bad == "skip":
            self._leave_out_the_bad(folder)
        if not self.paths:
            raise UserError(f"{folder} holds no images; put them in a folder for each class, as in {folder}/cat/1.jpg")

    def _empty_classes(self) -> list[str]:
        filled = {label for _, label in self.paths}
        return [name for label, name in enumerate(self.classes) if label not in filled]

    def _leave_out_the_bad(self, folder: Path) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow decodes outside of Python's lock
            good = list(threads.map(_can_be_read, (path for path, _ in self.paths)))
        self.skipped = [path for (path, _), fine in zip(self.paths, good) if not fine]
        self.paths = [entry for entry, fine in zip(self.paths, good) if fine]
        if self.skipped:
            some = ", ".join(str(path.relative_to(folder)) for path in self.skipped[:3])
            if self.paths and (empty := self._empty_classes()):
                raise UserError(f"{folder / empty[0]} holds no image that can be read; mend or remove it")
            warnings.warn(
                f"left out {len(self.skipped)} of the {len(good)} images of {folder}, which cannot be read: {some}"
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
    """An image file's pixels [height, width, 3]. Raises UserError, with its path, when it is no image.

    short_side: a JPEG is decoded at 1/8, 1/4 or 1/2 of its size, several times faster, where its shorter side keeps at
    least so many pixels. Source: Pillow's Image.draft.
    """
    if short_side is None and path.suffix.lower() in JPEG:
        with contextlib.suppress(OSError, ValueError):  # whatever is wrong with it, Pillow reads it or says why not
            file = path.read_bytes()
            _, _, colours, _ = simplejpeg.decode_jpeg_header(file)
            if colours in ("YCbCr", "Gray", "RGB"):  # of other colours the two make different pixels
                pixels: Pixels = simplejpeg.decode_jpeg(file, "RGB")
                return pixels
    try:
        with Image.open(path) as image:
            if short_side is not None:
                image.draft("RGB", (short_side, short_side))
            return np.array(image if image.mode == "RGB" else image.convert("RGB"))
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:  # Pillow's own, for what is broken
        raise UserError(
            f"{path} cannot be read as an image ({error}); mend or remove it, or leave out what is broken: bad='skip'"
        ) from error


def _can_be_read(path: Path) -> bool:
    try:
        decode(path)
    except UserError:
        return False
    return True


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Bilinear, with the antialiasing that makes small images look like the large ones."""
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


def center_crop(pixels: Pixels, size: int, short_side: int) -> Pixels:
    """The shorter side scaled to `short_side`, then the middle [size, size, 3]."""
    height, width = pixels.shape[:2]
    if min(height, width) != short_side or short_side < size:
        scale = short_side / min(height, width)
        pixels = resized(pixels, max(size, round(height * scale)), max(size, round(width * scale)))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return np.ascontiguousarray(pixels[top : top + size, left : left + size])


def random_resized_crop(pixels: Pixels, size: int, generator: torch.Generator) -> Pixels:
    """A part of 8 % to 100 % of the area, 3:4 to 4:3 in shape, scaled to [size, size, 3].

    Source: C. Szegedy et al., "Going Deeper with Convolutions", 2014; torchvision's RandomResizedCrop.
    """
    height, width = pixels.shape[:2]
    for _ in range(10):
        of_area, of_shape, of_height, of_width = _uniform(4, generator)
        area = height * width * (0.08 + 0.92 * of_area)
        shape = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * of_shape)
        w, h = round((area * shape) ** 0.5), round((area / shape) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            top, left = int((height - h + 1) * of_height), int((width - w + 1) * of_width)
            return resized(pixels[top : top + h, left : left + w], size, size)
    return center_crop(pixels, size, size)


def padded_crop(pixels: Pixels, padding: int, generator: torch.Generator) -> Pixels:
    """Zeros around the image, then a part of its own size from anywhere in it."""
    height, width = pixels.shape[:2]
    down, right = (int((2 * padding + 1) * number) - padding for number in _uniform(2, generator))
    crop = np.zeros_like(pixels)  # what is copied into it is the same without making the wide image
    crop[max(0, -down) : max(0, height - down), max(0, -right) : max(0, width - right)] = pixels[
        max(0, down) : max(0, height + down), max(0, right) : max(0, width + right)
    ]
    return crop


def flipped(pixels: Pixels, generator: torch.Generator) -> Pixels:
    """Mirrored left to right, one time in two."""
    return np.ascontiguousarray(pixels[:, ::-1]) if _uniform(1, generator)[0] < 0.5 else pixels


def _uniform(count: int, generator: torch.Generator) -> list[float]:
    """Numbers from [0, 1), in one call: each call costs some microseconds."""
    numbers: list[float] = torch.rand(count, generator=generator).tolist()
    return numbers
