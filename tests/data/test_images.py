"""Images: what is broken is named or left out and counted, and the crops are what they say, byte for byte."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate

from samestep.data import images
from samestep.data.images import ImageFolder, center_crop, decode, flipped, padded_crop, random_resized_crop
from samestep.errors import UserError


def picture(height: int, width: int, seed: int = 0) -> images.Pixels:
    """Smooth, so that JPEG keeps it nearly."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        path = tmp_path / ("cat", "dog")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(picture(40, 60, number)).save(path)
    return tmp_path


def spoil(folder: Path) -> list[Path]:
    """One image cut off, one that is none."""
    cut, other = folder / "cat" / "2.jpg", folder / "dog" / "3.jpg"
    cut.write_bytes(cut.read_bytes()[:-200])
    other.write_text("no image")
    return [cut, other]


def test_a_broken_image_is_named(folder: Path) -> None:
    cut, other = spoil(folder)
    dataset = ImageFolder(folder)
    for path in (cut, other):
        index = [entry for entry, _ in dataset.paths].index(path)
        with pytest.raises(UserError) as raised:
            dataset[index]
        assert str(raised.value).startswith(f"{path} ")
        assert "bad='skip'" in str(raised.value)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("settings", [{}, {"subsampling": 0}, {"progressive": True}, {"quality": 30}])
def test_pixels_are_pillows(tmp_path: Path, mode: str, settings: dict[str, int]) -> None:
    for number, (height, width) in enumerate(((33, 47), (1, 1), (8, 200))):
        path = tmp_path / f"{number}.jpg"
        Image.fromarray(picture(height, width, number)).convert(mode).save(path, **settings)
        with Image.open(path) as image:
            theirs = np.array(image.convert("RGB"))
        mine = decode(path)
        assert mine.shape == (height, width, 3) and mine.flags.c_contiguous and mine.flags.writeable
        assert (mine == theirs).all()


def test_a_png_that_is_called_a_jpeg_is_read(tmp_path: Path) -> None:
    Image.fromarray(picture(5, 6)).save(tmp_path / "0.jpg", format="png")
    assert (decode(tmp_path / "0.jpg") == picture(5, 6)).all()


def test_broken_images_are_left_out_and_counted(folder: Path) -> None:
    bad = spoil(folder)
    with pytest.warns(UserWarning, match=r"left out 2 of the 6 images of .*: cat/2.jpg, dog/3.jpg$"):
        dataset = ImageFolder(folder, bad="skip")
    assert dataset.skipped == bad
    assert [path.name for path, _ in dataset.paths] == ["0.jpg", "4.jpg", "1.jpg", "5.jpg"]
    assert [label for _, label in (dataset[index] for index in range(len(dataset)))] == [0, 0, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ImageFolder(folder)


def test_a_class_of_which_nothing_is_left_is_said(folder: Path) -> None:
    for path in (folder / "cat").iterdir():
        path.write_text("no image")
    with pytest.raises(UserError, match="cat holds no "):
        ImageFolder(folder, bad="skip")


def test_a_folder_where_all_is_broken_holds_no_images(folder: Path) -> None:
    for path in folder.glob("*/*"):
        path.write_text("no image")
    with pytest.warns(UserWarning, match="left out 6 of the 6"), pytest.raises(UserError, match="holds no images"):
        ImageFolder(folder, bad="skip")


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_every_kind_of_image_becomes_red_green_blue(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.jpg" if mode in ("L", "CMYK") else "a.png")
    Image.fromarray(picture(8, 9)).convert(mode).save(path)
    assert decode(path).shape == (8, 9, 3) and decode(path).dtype == np.uint8


@pytest.mark.parametrize(("short_side", "shape"), [(None, (480, 640, 3)), (240, (240, 320, 3)), (100, (120, 160, 3))])
def test_a_jpeg_is_decoded_no_larger_than_is_asked(short_side: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    Image.fromarray(picture(480, 640)).save(tmp_path / "a.jpg", quality=95)
    small = decode(tmp_path / "a.jpg", short_side)
    assert small.shape == shape
    assert abs(small.astype(int) - picture(*shape[:2]).astype(int)).mean() < 8  # the same picture


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("padding", [1, 4, 40])
def test_a_padded_crop_is_one_of_the_padded_image(padding: int) -> None:
    pixels = picture(20, 30) | 1  # no zeros in it
    wide = np.pad(pixels, ((padding, padding), (padding, padding), (0, 0)))
    places = set()
    for seed in range(60):
        top, left = (int((2 * padding + 1) * number) for number in torch.rand(2, generator=generator(seed)).tolist())
        crop = padded_crop(pixels, padding, generator(seed))
        assert (crop == wide[top : top + 20, left : left + 30]).all()
        places.add((top, left))
    assert len(places) > (8 if padding == 1 else 40)


def test_half_of_the_images_are_mirrored() -> None:
    pixels = picture(5, 7)
    seen = [flipped(pixels, generator(seed)) for seed in range(200)]
    mirrored = [(image == pixels[:, ::-1]).all() for image in seen]
    assert all((image == (pixels[:, ::-1] if other else pixels)).all() for image, other in zip(seen, mirrored))
    assert 70 < sum(mirrored) < 130


def test_a_resized_crop_may_be_from_anywhere_in_the_image() -> None:
    """Pixels that tell their row in red and their column in green."""
    pixels = np.zeros((40, 200, 3), np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(40)[:, None], np.arange(200)
    crops = [random_resized_crop(pixels, 16, generator(seed)) for seed in range(300)]
    assert min(crop[..., 0].min() for crop in crops) <= 2 and max(crop[..., 0].max() for crop in crops) >= 37
    assert min(crop[..., 1].min() for crop in crops) <= 5 and max(crop[..., 1].max() for crop in crops) >= 194
    for crop in crops:
        assert (np.diff(crop[..., 0].astype(int), axis=0) >= 0).all()  # neither turned nor mirrored
        assert (np.diff(crop[..., 1].astype(int), axis=1) >= 0).all()


def test_a_resized_crop_has_its_size_and_differs_by_seed() -> None:
    pixels = picture(60, 90)
    crops = [random_resized_crop(pixels, 32, generator(seed)) for seed in range(20)]
    assert all(crop.shape == (32, 32, 3) for crop in crops)
    assert len({crop.tobytes() for crop in crops}) == 20
    assert (crops[0] == random_resized_crop(pixels, 32, generator(0))).all()
    narrow = random_resized_crop(picture(4, 400), 8, generator(0))  # no shape fits: the middle
    assert narrow.shape == (8, 8, 3)


@pytest.mark.parametrize(("height", "width"), [(40, 60), (60, 40), (32, 32), (256, 300)])
def test_a_center_crop_is_the_middle(height: int, width: int) -> None:
    assert center_crop(picture(height, width), 28, 32).shape == (28, 28, 3)
    pixels = picture(32, 48)
    assert (center_crop(pixels, 28, 32) == pixels[2:30, 10:38]).all()  # already of the right size: not scaled


def test_what_is_returned_collates_without_a_word(folder: Path) -> None:
    pixels, _ = ImageFolder(folder)[0]
    made = [
        padded_crop(pixels, 4, generator(0)),
        pixels,
        *(flipped(pixels, generator(seed)) for seed in range(8)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # arrays that cannot be written to, or that run backwards
        batch = default_collate(made)
        default_collate([center_crop(pixels, 16, 20), random_resized_crop(pixels, 16, generator(0))])
    assert batch.dtype == torch.uint8 and batch.shape == (10, 40, 60, 3)


def test_hidden_folders_are_no_classes_and_empty_ones_are_said(folder: Path) -> None:
    (folder / ".cache").mkdir()
    assert ImageFolder(folder).classes == ["cat", "dog"]
    (folder / "eel").mkdir()
    with pytest.raises(UserError, match="eel holds no "):
        ImageFolder(folder)
