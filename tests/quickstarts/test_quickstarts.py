"""Each quickstart: `samestep check` finds nothing wrong, its evaluation is the same on any number of processes, and
killed and started again it ends with the weights of a training that was not."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from budget import budget
from command import samestep
from lane_marks import CHECK, FULL
from samestep.records.files import from_json
from samestep.records.script import CheckResults
from scripted_engines import SCRIPTED

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks" / "eject"))
import scripts

FOLDER = Path(__file__).parents[2] / "quickstarts"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
LINES = 195
# One process, or one that starts the others itself: nothing for `samestep check` to compare.
ONE_PROCESS = ("resnet_single", "resnet_dataparallel", "resnet_split")
IN_CHECK = ("resnet_ddp",)  # some 20 s; make check has no room for more
IMAGES = "--batch-size 12 --image-size 16 --width 4 --blocks 1 --workers 0 --epochs 3 --lr 0.02"
TEXT = "--steps 27 --batch-size 12 --accumulate 2 --length 32 --layers 2 --width 32 --save-every 9"
FIGURE = re.compile(r"loss (\d+\.\d+)(?:, accuracy (\d\.\d+))?")
IMPORTS = {"hf": "transformers accelerate", "accelerate": "accelerate", "lightning": "lightning", "fabric": "lightning"}


def engine_of(name: str) -> str:
    return name.partition("_")[2]


def cases(names: list[str]) -> list[object]:
    return [pytest.param(name, marks=CHECK if name in IN_CHECK else FULL) for name in names]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The arguments that name the data: a folder of noisy images, and a text. The evaluation's rows do not divide."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, rows in (("train", 27), ("val", 5)):
        for label in range(5):
            (folder / split / f"class{label}").mkdir(parents=True)
            for number in range(rows - (label == 0)):
                pixels = random.integers(0, 80, (16, 16, 3)) + 30 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / f"class{label}" / f"{number}.png")
    (folder / "text").write_text("".join(random.choice([*"samestep \n"], 8000)))
    return {"resnet": [*IMAGES.split(), "--data", str(folder)], "gpt": [*TEXT.split(), "--text", str(folder / "text")]}


def arguments(name: str, data: dict[str, list[str]]) -> list[str]:
    return data[name.partition("_")[0]]


def run(name: str, folder: Path, size: int, words: list[str]) -> str:
    """Runs a copy of a quickstart in `folder`, and returns what it has printed."""
    folder.mkdir(exist_ok=True)
    copied = Path(shutil.copy(FOLDER / f"{name}.py", folder))
    scripts.skip_unless_here(engine_of(name))
    return scripts.launch(copied, words, engine_of(name), size, hidden=True, imports=IMPORTS.get(engine_of(name), ""))


def last_figure(printed: str) -> tuple[str, ...]:
    return FIGURE.findall(printed)[-1]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of the last checkpoint that a quickstart has written in `folder`."""
    from safetensors.torch import load_file

    files = [
        folder / "checkpoint.pt",
        folder / "checkpoint.ckpt",
        *folder.glob("checkpoint.pt/*/mp_rank_00_model_states.pt"),
    ]
    files += folder.glob("checkpoints/*/model.safetensors")
    file = max((file for file in files if file.is_file()), key=lambda file: file.stat().st_mtime)
    if file.suffix == ".safetensors":
        return load_file(file)
    saved = torch.load(file, weights_only=False)
    return next(saved[key] for key in ("model", "module", "state_dict") if key in saved)


@pytest.mark.parametrize("name", NAMES)
def test_a_quickstart_stands_alone(name: str) -> None:
    """It is short, imports nothing of samestep, and has no line of its own in what all of its kind share."""
    text = (FOLDER / f"{name}.py").read_text()
    assert text.count("\n") <= LINES
    assert "samestep" not in text
    tree, shared = ast.parse(text), ast.parse((FOLDER / f"{name.partition('_')[0]}_ddp.py").read_text())
    parts, parts_of_ddp = (
        {node.name: ast.unparse(node) for node in module.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        for module in (tree, shared)
    )
    common = parts.keys() & {"Block", "GPT", "resnet"}
    assert {key: parts[key] for key in common} == {key: parts_of_ddp[key] for key in common}


def test_every_engine_has_a_quickstart() -> None:
    assert {engine_of(name) for name in NAMES} == {*SCRIPTED}
    listed = (FOLDER / "README.md").read_text()
    assert [name for name in NAMES if f"({name}.py)" not in listed] == []


@pytest.mark.parametrize("name", cases([name for name in NAMES if name not in ONE_PROCESS and name != "resnet_ray"]))
@pytest.mark.parametrize("size", [2, 3])
def test_check_finds_nothing_wrong(name: str, size: int, data: dict[str, list[str]], tmp_path: Path) -> None:
    """Before the first checkpoint, from which the replay in one process would continue."""
    scripts.skip_unless_here(engine_of(name))
    words = ["check", "--nproc", str(size), "--steps", "8", "--json"]
    file = str(FOLDER / f"{name}.py")
    if engine_of(name) == "horovod":
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))
        command = ["--", horovodrun, "-np", str(size), "--gloo", sys.executable, file]
    else:
        command = ["--launcher", "fork", file]
    given = [*arguments(name, data), "--checkpoint", str(tmp_path / "checkpoint")]
    done = samestep(*words, "--out", str(tmp_path / "out"), *command, *given, imports=300)
    results = from_json(CheckResults, json.loads(done.stdout))
    assert [finding.message for finding in results.findings if finding.answer == "differs"] == []
    assert done.returncode == 0, done.stderr
    answers = {finding.question: finding.answer for finding in results.findings}
    # check replays nothing of DeepSpeed's.
    judged = ["rows", "gradient", "weights"] + ["replayed gradient"] * (engine_of(name) != "deepspeed")
    assert {answers[key] for key in judged} == {"right"}


@pytest.mark.parametrize("name", cases(NAMES))
def test_an_evaluation_is_the_same_on_any_number_of_processes(
    name: str, data: dict[str, list[str]], tmp_path: Path
) -> None:
    trained = last_figure(run(name, tmp_path, 2, arguments(name, data)))
    sizes = (1,) if name in ONE_PROCESS else (1, 2, 3)
    for size in sizes:
        assert last_figure(run(name, tmp_path, size, [*arguments(name, data), "--evaluate"])) == trained


@pytest.mark.parametrize("name", cases(NAMES))
def test_a_killed_training_ends_with_the_weights_of_the_uninterrupted_one(
    name: str, data: dict[str, list[str]], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(name, whole, 2, arguments(name, data))
    killed.mkdir()
    first = _start(name, killed, arguments(name, data))
    log = killed / "first.txt"
    until = time.monotonic() + budget(60)
    while not FIGURE.search(log.read_text()) and first.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    for process in [*psutil.Process(first.pid).children(recursive=True), first]:  # torchrun's ranks outlive it
        process.kill()
    first.wait()
    assert 0 < len(FIGURE.findall(log.read_text())) < 3, log.read_text()
    run(name, killed, 2, arguments(name, data))
    uninterrupted, resumed = weights(whole), weights(killed)
    assert [key for key in uninterrupted if not torch.equal(uninterrupted[key], resumed[key])] == []


def _start(name: str, folder: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """Starts a quickstart as its first lines say."""
    file = str(FOLDER / f"{name}.py")
    python = Path(sys.executable)
    commands = {"horovod": [str(python.with_name("horovodrun")), "-np", "2", str(python)]}
    torchrun = [str(python.with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    command = [str(python)] if name in (*ONE_PROCESS, "resnet_ray") else commands.get(engine_of(name), torchrun)
    with open(folder / "first.txt", "wb") as log:
        return subprocess.Popen(
            [*command, file, *words],
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
