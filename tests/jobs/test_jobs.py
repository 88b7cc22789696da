"""The built-in jobs, on small data of their own format: each is the same training on several ranks, and learns."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from command import samestep
from lane_marks import CHECK, FULL
from samestep.errors import UserError
from samestep.jobs.models.gpt import GPT
from samestep.jobs.models.resnet import resnet18, resnet50
from samestep.tasks.inspect.load import build, builtin_names

ROWS, HELD_OUT = 40, 12
SMALL = {
    "cifar10": ["width=4", "global_batch=12"],
    "imagefolder": ["width=4", "size=32", "global_batch=12", "workers=0"],
    "charlm": ["length=8", "layers=1", "width=16", "heads=2", "global_batch=12", "limit=40"],
    "imdb": ["length=16", "layers=1", "width=32", "vocabulary=200", "global_batch=12", "dropout=0.1"],
}


def _pixels(draw: np.random.Generator, label: int) -> Any:
    """Brighter for a higher label, and darker downwards and in blue, so that a turned picture is another."""
    down, colour = np.arange(32)[:, None, None], np.arange(3)
    return (draw.integers(0, 30, (32, 32, 3)) + 19 * label + 31 - down - 10 * colour + 20).astype(np.uint8)


def write_images(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for part, rows in (("train", ROWS), ("test", HELD_OUT)):
        for row in range(rows):
            place = folder / part / f"class{row % 10}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(_pixels(draw, row % 10)).save(place / f"{row:03}.png")


def write_official(folder: Path) -> None:
    """CIFAR-10's python version, some rows of it."""
    draw = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for name, rows in [*((f"data_batch_{number}", ROWS // 5) for number in range(1, 6)), ("test_batch", HELD_OUT)]:
        labels = [row % 10 for row in range(rows)]
        data = np.stack([_pixels(draw, label).transpose(2, 0, 1).reshape(-1) for label in labels])
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": labels}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "images")
    write_official(folder / "official")
    draw = random.Random(0)
    words = ["dull", "fine", "the", "a", "film", "was", "and"]
    (folder / "reviews").mkdir()
    for name, rows in (("train", ROWS), ("test", HELD_OUT)):
        telling = ("awful", "great")  # which of them a review holds is its label
        lines = [f"{' '.join([*draw.choices(words, k=5), *[telling[row % 2]] * 4])}\t{row % 2}" for row in range(rows)]
        (folder / "reviews" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (folder / "text.txt").write_text("".join(draw.choice(["abc ", "defgh "]) for _ in range(180)))
    return {
        "cifar10": folder / "official",
        "imagefolder": folder / "images",
        "imdb": folder / "reviews",
        "charlm": folder / "text.txt",
    }


def settings(job: str, data: dict[str, Path]) -> dict[str, str]:
    return {"data": str(data[job])} | dict(pair.split("=") for pair in SMALL[job])


def test_every_built_in_job_is_here() -> None:
    assert {*SMALL, "digits"} == set(builtin_names())


@pytest.mark.parametrize("engine", [pytest.param("fsdp", marks=CHECK), pytest.param("ddp", marks=FULL)])
@pytest.mark.parametrize("job", SMALL)
def test_a_job_is_the_same_training_on_several_ranks(
    job: str, engine: str, data: dict[str, Path], tmp_path: Path
) -> None:
    chosen = [word for pair in settings(job, data).items() for word in ("--set", "=".join(pair))]
    asked = ["--engines", engine, "--nproc", "2", "--steps", "4", "--json"]
    done = samestep("verify", job, *chosen, *asked, out=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["verdict"] for row in json.loads(done.stdout)["engines"]] == ["same"]


@pytest.mark.parametrize("job", SMALL)
def test_a_job_file_is_short(job: str) -> None:
    import samestep.jobs

    assert len((Path(samestep.jobs.__path__[0]) / f"{job}.py").read_text().splitlines()) <= 120


def test_both_formats_of_cifar10_are_read(data: dict[str, Path]) -> None:
    official = build("cifar10", settings("cifar10", data))
    folders = build("cifar10", settings("cifar10", {"cifar10": data["imagefolder"]}))
    for job in (official, folders):
        pixels, label = job.train[7]
        assert np.asarray(pixels).shape == (32, 32, 3) and np.asarray(pixels).dtype == np.uint8
        assert abs(int(np.asarray(pixels).mean()) - 40 - 19 * label) < 8  # what was written for this label
        assert pixels[:8].mean() > pixels[-8:].mean() + 15 and pixels[..., 0].mean() > pixels[..., 2].mean() + 15


@pytest.mark.parametrize(("make", "millions"), [(resnet18, 11.69), (resnet50, 25.56)])
def test_a_resnet_has_torchvisions_size(make: Any, millions: float) -> None:
    """https://docs.pytorch.org/vision/stable/models.html"""
    assert sum(p.numel() for p in make(1000).parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize(
    ("job", "chosen", "says"),
    [
        ("cifar10", "data=nowhere", "nowhere holds neither data_batch_1 nor train/"),
        ("imagefolder", "data=nowhere", "there is no folder nowhere/train"),
        ("imdb", "data=nowhere", "nowhere/train.tsv cannot be read"),
        ("charlm", "data=nowhere", "nowhere cannot be read as a text"),
    ],
)
def test_data_that_is_not_there_is_one_sentence(job: str, chosen: str, says: str) -> None:
    done = samestep("verify", job, "--set", chosen)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.check
def test_every_process_learns_the_same_words(tmp_path: Path) -> None:
    """The tokenizer's trainer decides between words that are as frequent as one another, and there are many."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(300)]
    for name in ("train", "test"):
        lines = (f"{' '.join(draw.choices(words, k=9))}\t{row % 2}\n" for row in range(60))
        (tmp_path / f"{name}.tsv").write_text("".join(lines))
    script = (
        "from pathlib import Path; from samestep.jobs.imdb import encoder, read; "
        f"data = Path({str(tmp_path)!r}); encode, tokens = encoder(data, None, 16, 150); "
        "print(tokens, encode(read(data / 'train.tsv')[0]).tolist())"
    )
    seen = {subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(seen) == 1


def test_gpt_does_not_see_what_follows() -> None:
    model = GPT(11, 12, layers=2, heads=2, width=16, dropout=0.0).eval()
    tokens = torch.randint(11, (1, 12), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 7:] = (other[0, 7:] + 1) % 11
    seen, changed = model(tokens), model(other)
    assert torch.allclose(seen[0, :7], changed[0, :7]) and not torch.allclose(seen[0, 7:], changed[0, 7:])


def test_charlm_is_to_say_what_follows(data: dict[str, Path]) -> None:
    job = build("charlm", settings("charlm", data))
    (first, follows), (second, _) = job.train[0], job.train[1]
    assert follows[:-1].tolist() == first[1:].tolist() and follows[-1] == second[0]


@pytest.mark.parametrize("name", ["cifar10", "imagefolder"])
def test_training_images_are_augmented_and_test_images_are_not(name: str, data: dict[str, Path]) -> None:
    job = build(name, settings(name, data))
    assert job.augment and job.evaluation
    pixels = np.asarray(job.train[0][0])
    made = [np.asarray(job.augment(job.train[0], torch.Generator().manual_seed(seed))[0]) for seed in range(8)]
    assert len({image.tobytes() for image in made}) > 4 and all(image.shape == pixels.shape for image in made)
    assert (np.asarray(job.evaluation[0][0]) == np.asarray(job.evaluation[0][0])).all()


def test_top5_takes_five(data: dict[str, Path]) -> None:
    job = build("imagefolder", settings("imagefolder", data))
    output, targets = torch.arange(10.0).expand(10, 10), torch.arange(10)
    batch = SimpleNamespace(targets=targets)
    assert job.metrics["top1"](output, batch).tolist() == [False] * 9 + [True]
    assert job.metrics["top5"](output, batch).tolist() == [False] * 5 + [True] * 5


def test_imdb_does_not_look_at_what_pads(data: dict[str, Path]) -> None:
    job = build("imdb", settings("imdb", data))
    model = job.model().eval()
    tokens = job.train[0][0][None].clone()  # type: ignore[index]
    tokens[0, 8:] = 0
    longer = torch.cat([tokens, torch.zeros(1, 0, dtype=tokens.dtype)], 1)
    shorter = tokens[:, :8]
    outputs = [job.forward(model, SimpleNamespace(inputs=each)) for each in (longer, shorter)]  # type: ignore[arg-type]
    assert torch.allclose(*outputs, atol=1e-6)


@pytest.mark.parametrize(
    ("line", "says"),
    [("a film\t2", "each of its lines is a review, a tab and 0 or 1"), ("a film", "each of its lines")],
)
def test_a_line_that_is_no_review_is_said(line: str, says: str, tmp_path: Path) -> None:
    from samestep.jobs.imdb import read  # with torchmetrics, which takes seconds

    (tmp_path / "train.tsv").write_text(f"a film\x85and more\t1\r\n{line}\n")
    with pytest.raises(UserError, match=says):
        read(tmp_path / "train.tsv")
    (tmp_path / "train.tsv").write_text("a film\x85and more\t1\r\nanother\t0")
    assert [len(part) for part in read(tmp_path / "train.tsv")] == [2, 2]
