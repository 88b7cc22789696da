"""The benchmark of the input pipeline: both arms load what they say, on every rank, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_IMPORTS = 200
sys.path.insert(0, str(BENCHMARKS))

import feeds  # noqa: E402
import input as benchmark  # noqa: E402
from budget import budget  # noqa: E402
from lane_marks import FULL  # noqa: E402
from samestep.world import World  # noqa: E402

pytestmark = pytest.mark.check


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 pictures of 32x32 in two classes."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(160):
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return folder


@pytest.mark.parametrize("arm", ["samestep", "dataloader"])
@pytest.mark.parametrize("workers", [0, 1])
def test_both_arms_give_the_same_kind_of_batch(arm: str, workers: int, images: Path) -> None:
    data = feeds.sources(images)["jpeg folders"]()
    feed = feeds.ARMS[arm](data, World(), workers)
    inputs, targets = next(feed)
    feed.close()
    assert (inputs.shape, inputs.dtype, len(targets)) == ((64, 3, 32, 32), feeds.torch.float32, 64)
    assert abs(float(inputs.mean())) < 1 and 0.5 < float(inputs.std()) < 2  # normalised


def test_both_ways_of_normalising_agree(images: Path) -> None:
    """Where nothing is cropped or flipped: sample by sample in floats, and the whole batch from bytes."""
    data = feeds.sources(images)["jpeg folders"]()
    pixels = np.stack([data[index][0] for index in range(4)])
    ours = feeds.Normalised()(feeds.torch.from_numpy(pixels))
    tutorial = feeds.TutorialImages(images)
    scaled = feeds.torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    feeds.torch.testing.assert_close(ours, (scaled - tutorial.mean) / tutorial.std, atol=1e-5, rtol=1e-5)


def test_a_block_takes_as_long_as_on_the_slower_rank() -> None:
    launches = [[{"seconds": {"a": [1.0, 5.0]}}, {"seconds": {"a": [2.0, 3.0]}}]]
    assert benchmark.slowest(launches, "a").tolist() == [[2.0, 5.0]]


@FULL
def test_a_short_run_records_every_case(images: Path, tmp_path: Path) -> None:
    short = ["--rounds", "1", "--launches", "1", "--block", "2", "--ranks", "2", "--width", "8", "--steps", "20"]
    command = [sys.executable, str(BENCHMARKS / "input.py"), "--images", str(images), "--only", "jpeg", *short]
    before = set(psutil.Process().children(recursive=True))
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=budget(DEADLINE_IMPORTS)
    )
    assert done.returncode == 0, done.stderr
    assert set(psutil.Process().children(recursive=True)) <= before
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert {(case["source"], case["ranks"], case["workers"]) for case in raw["loading"]} >= {("jpeg folders", 2, 0)}
    for case in raw["loading"]:
        (ranks,) = case["launches"]
        assert len(ranks) == 2
        for rank in ranks:
            assert rank["machine"]["versions"]["torch"]
            assert {name: len(seconds) for name, seconds in rank["seconds"].items()} == dict.fromkeys(feeds.ARMS, 1)
        assert case["rows_per_s"]["samestep"] == pytest.approx(
            64 * 2 * 2 / benchmark.slowest([ranks], "samestep")[0, 0]
        )
        assert case["ours"]["verdict"] in ("met", "not met", "not resolved")
    (trained,) = raw["training"]
    assert 0 <= trained["wait_share"] < 1 and trained["ceiling"] > 0 and len(trained["step_s"]) == 20
    assert "jpeg folders" in (tmp_path / "table.txt").read_text()
