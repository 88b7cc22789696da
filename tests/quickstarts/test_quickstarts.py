"""Each quickstart: `samestep check` finds nothing wrong, its evaluation is the same on any number of processes, and
killed and started again it ends with the weights of a training that was not. Those whose processes divide the model end
with the weights of a plain loop in one process."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from budget import budget
from command import samestep
from lane_marks import CHECK, FULL
from planting import Edit, plant_in_files
from samestep import engine as engines
from samestep.records.files import from_json
from samestep.records.findings import CheckResults

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks" / "eject"))
import scripts

FOLDER = Path(__file__).parents[2] / "quickstarts"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
LINES = 195
# Whose processes divide the model: their engine, and the numbers of processes that it is tried with.
MODEL_PARALLEL = {
    "tensor_parallel": ("tensor", (1, 2, 4)),
    "pipeline_parallel": ("pipeline", (1, 2)),
    "fsdp_tensor_parallel": ("fsdp", (2, 4)),
}
LINES_MODEL_PARALLEL = 240
NO_QUICKSTART = {"context", "expert"}
# One process, or one that starts the others itself: nothing for `samestep check` to compare.
ONE_PROCESS = ("resnet_single", "resnet_dataparallel", "resnet_split")
CHECKED = [name for name in NAMES if name not in (*ONE_PROCESS, *MODEL_PARALLEL, "resnet_ray")]
IN_CHECK = ("resnet_ddp",)  # some 20 s; make check has no room for more
IMAGES = "--batch-size 12 --image-size 16 --width 4 --blocks 1 --workers 0 --epochs 3 --lr 0.02"
TEXT = "--steps 27 --batch-size 12 --accumulate 2 --length 32 --layers 2 --width 32 --save-every 9"
FIGURE = re.compile(r"loss (\d+\.\d+)(?:, accuracy (\d\.\d+))?")
IMPORTS = {"hf": "transformers accelerate", "accelerate": "accelerate", "lightning": "lightning", "fabric": "lightning"}


DOUBLE = {"    dist.init_process_group()": "    torch.set_default_dtype(torch.float64)\n    dist.init_process_group()"}
OWN_ROWS = {"num_replicas=1, rank=0": "num_replicas=world_size, rank=rank"}
# What a user would get wrong, at a line that a comment warns of.
FAULTS = {
    "its own rows on each rank of a tensor parallel layer": ("tensor_parallel", OWN_ROWS),
    "parts and plain tensors clipped by two norms": (
        "tensor_parallel",
        {"clip_grads_with_norm_(group, limit, norm, foreach=False)": "clip_grad_norm_(group, limit, foreach=False)"},
    ),
    "other rows on the stage that has the loss": ("pipeline_parallel", OWN_ROWS),
    "clipped by the norm of one stage": (
        "pipeline_parallel",
        {"    dist.all_reduce(squared)": "    pass"},
    ),
    "its own rows on each rank, not on each replica": (
        "fsdp_tensor_parallel",
        {'"num_replicas": replicas, "rank": data_mesh.get_local_rank()': '"num_replicas": world_size, "rank": rank'},
    ),
}


InOneProcess = Callable[[str], dict[str, torch.Tensor]]


def engine_of(name: str) -> str:
    return MODEL_PARALLEL[name][0] if name in MODEL_PARALLEL else name.partition("_")[2]


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
    text = [*TEXT.split(), "--text", str(folder / "text")]
    return {"resnet": [*IMAGES.split(), "--data", str(folder)], "gpt": text}


def arguments(name: str, data: dict[str, list[str]]) -> list[str]:
    if name not in MODEL_PARALLEL:
        return data[name.partition("_")[0]]
    accumulate = data["gpt"].index("--accumulate")
    return data["gpt"][:accumulate] + data["gpt"][accumulate + 2 :]


def run(name: str, folder: Path, size: int, words: list[str], changes: Mapping[str, str] | None = None) -> str:
    """Runs a copy of a quickstart in `folder`, with these texts replaced, and returns what it has printed."""
    folder.mkdir(exist_ok=True)
    copied = Path(shutil.copy(FOLDER / f"{name}.py", folder))
    plant_in_files(folder, (Edit(*change) for change in (changes or {}).items()), copied.name)
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
    assert text.count("\n") <= (LINES_MODEL_PARALLEL if name in MODEL_PARALLEL else LINES)
    assert "samestep" not in text
    alike = {"fsdp_tensor_parallel": "tensor_parallel", "pipeline_parallel": "gpt_ddp", "tensor_parallel": "gpt_ddp"}
    like = alike.get(name, f"{name.partition('_')[0]}_ddp")
    tree, shared = ast.parse(text), ast.parse((FOLDER / f"{like}.py").read_text())
    parts, parts_of_ddp = (
        {node.name: ast.unparse(node) for node in module.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        for module in (tree, shared)
    )
    common = parts.keys() & parts_of_ddp.keys() & {"Attention", "Block", "GPT", "resnet"}
    common -= {"tensor_parallel": {"Block", "GPT"}, "pipeline_parallel": {"GPT"}}.get(name, set())
    assert {key: parts[key] for key in common} == {key: parts_of_ddp[key] for key in common}


def test_every_engine_has_a_quickstart() -> None:
    assert {engine_of(name) for name in NAMES} == {*engines.names()} - NO_QUICKSTART
    listed = (FOLDER / "README.md").read_text()
    assert [name for name in NAMES if f"({name}.py)" not in listed] == []


@pytest.mark.parametrize("name", cases(CHECKED))
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
    # Processes that divide the model add up a row's loss in other orders: in float32 its last digit may be another.
    changes = DOUBLE if name in MODEL_PARALLEL else {}
    trained = last_figure(run(name, tmp_path, 2, arguments(name, data), changes))
    sizes = MODEL_PARALLEL[name][1] if name in MODEL_PARALLEL else (1,) if name in ONE_PROCESS else (1, 2, 3)
    for size in sizes:
        assert last_figure(run(name, tmp_path, size, [*arguments(name, data), "--evaluate"], changes)) == trained


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


@pytest.fixture(scope="module")
def in_one_process(data: dict[str, list[str]]) -> InOneProcess:
    """Returns the weights of a quickstart's model and text in a plain loop, in float64."""

    @cache
    def trained(name: str) -> dict[str, torch.Tensor]:
        of_file = runpy.run_path(str(FOLDER / f"{name}.py"))
        words = arguments(name, data)
        options = dict(zip(words[::2], words[1::2], strict=True))
        steps, rows, length = (int(options[key]) for key in ("--steps", "--batch-size", "--length"))
        text = of_file["Text"](options["--text"], length)
        torch.manual_seed(0)
        model = of_file["GPT"](length, int(options["--layers"]), int(options["--width"]), heads=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps, cycle_momentum=False)
        for step in range(steps):
            epoch, batch = divmod(step, len(text) // rows)
            order = torch.randperm(len(text), generator=torch.Generator().manual_seed(epoch)).tolist()
            inputs, targets = zip(*(text[row] for row in order[batch * rows : (batch + 1) * rows]), strict=True)
            F.cross_entropy(model(torch.stack(inputs)).flatten(0, 1), torch.stack(targets).flatten()).backward()
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.5, "nothing to clip"
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return dict(model.state_dict())

    def in_double(name: str) -> dict[str, torch.Tensor]:
        torch.set_default_dtype(torch.float64)
        try:
            return trained(name)
        finally:
            torch.set_default_dtype(torch.float32)

    return in_double


def largest_difference(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    assert weights.keys() == expected.keys()
    return max(float((weights[key] - expected[key]).abs().max()) for key in expected)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=CHECK if size == sizes[-1] else FULL)
        for name, (_, sizes) in MODEL_PARALLEL.items()
        for size in sizes
    ],
)
def test_processes_that_divide_the_model_train_it_as_one(
    name: str, size: int, data: dict[str, list[str]], in_one_process: InOneProcess, tmp_path: Path
) -> None:
    """Over two epochs, with all gradients clipped. Measured: 6e-16 at most; the faults below, 1e-4 to 2e-2."""
    run(name, tmp_path, size, arguments(name, data), DOUBLE)
    assert largest_difference(weights(tmp_path), in_one_process(name)) < 1e-13


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=FULL if row else CHECK) for row, fault in enumerate(FAULTS)]
)
def test_the_weights_show_what_a_user_would_get_wrong(
    fault: str, data: dict[str, list[str]], in_one_process: InOneProcess, tmp_path: Path
) -> None:
    name, changes = FAULTS[fault]
    run(name, tmp_path, 2 if name != "fsdp_tensor_parallel" else 4, arguments(name, data), {**DOUBLE, **changes})
    difference = largest_difference(weights(tmp_path), in_one_process(name))
    print(f"{fault}: {difference:.1e}")
    assert difference > 1e-7


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
