"""An ejected script trains and evaluates as samestep does, to the last bit, where samestep cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from scripts import HERE, launch, result, run_own, run_script, runtime_of, skip_unless_here, write

from budget import budget
from command import DRAWN
from lane_marks import CHECK, FULL, in_turn
from planting import Edit, plant_in_files, with_patches
from said import refuses
from samestep.world.mesh import parse_mesh
from scripted_engines import DIVIDING, ON_MESHES, SCRIPTED

DIGITS = {"epochs": "1", "width": "8"}
LAYOUTS = f"{HERE.parents[1]}/resume/jobs_layouts.py:carried"
# Micro-batches, clipping, groups, weights, a last step that leaves a rank without rows.
EVERYTHING = {"rows": "29", "global_batch": "9", "micro_batch": "2", "clip_norm": "0.1", "weighted": "true"}
EVERYTHING |= {"optimizer": "groups", "arch": "deep"}
# An engine whose own training is the same to the bit, and needs no GPUs and no cluster.
STANDS_FOR = {"dataparallel": "single", "ray": "ddp"}
OTHERS = [engine for engine in SCRIPTED if engine not in ("dataparallel", "ddp")]


@pytest.mark.parametrize("engine", DIVIDING)
def test_no_script_is_written_for_ranks_that_divide_the_model(engine: str, tmp_path: Path) -> None:
    with refuses("script_cannot_divide_the_model", engine=engine):
        write("digits", engine, tmp_path / "script", 2, DIGITS)


@pytest.mark.parametrize(("engine", "mesh"), [pytest.param(*pair, marks=CHECK) for pair in ON_MESHES])
def test_ranks_that_divide_the_model(engine: str, mesh: str, tmp_path: Path) -> None:
    """Averaged weights, groups, clipping, micro-batches, and how layers are split as text."""
    arranged = parse_mesh(mesh)
    assert arranged
    script = write(LAYOUTS, engine, tmp_path / "script", arranged.size, {}, mesh)
    assert ('"blocks.0.query": "colwise",' in script.read_text()) is (arranged.tensor > 1)
    assert script.read_text().count("\n") <= 350
    own = run_own(LAYOUTS, engine, tmp_path / "own", arranged.size, {}, mesh=mesh)
    run_script(script, engine, arranged.size).check_equal(own)
    if mesh == "data=2,tensor=2":  # and each rank with rows of its own, as of another mesh, is another training
        other_rows = Edit("return self.mesh.replica(self.rank)", "return self.rank % self.replicas")
        plant_in_files(script.parent, [other_rows], runtime_of(script).name)
        with pytest.raises(AssertionError):
            run_script(script, engine, arranged.size).check_equal(own)


def test_a_pipeline_of_one_stage_has_all_of_the_model(tmp_path: Path) -> None:
    text = write("digits", "pipeline", tmp_path / "script", 2, DIGITS, "data=2").read_text()
    assert "RANK_OF: list[int] = [0]" in text and '": (0,),' in text


LIBRARIES = ("accelerate", "deepspeed", "fabric", "hf", "lightning")  # that take long to import


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, marks=CHECK if engine in LIBRARIES else ()) for engine in SCRIPTED]
)
def test_digits_is_the_same_training(engine: str, tmp_path: Path) -> None:
    skip_unless_here(engine)
    script = write("digits", engine, tmp_path / "script", 2, DIGITS)
    own = STANDS_FOR.get(engine, engine)
    run_script(script, engine, 2).check_equal(run_own("digits", own, tmp_path / "own", 2, DIGITS))


def test_a_script_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """Here after it was ended in its second epoch."""
    _check_continues("ddp", tmp_path, epochs=3)


def _check_continues(engine: str, folder: Path, epochs: int) -> None:
    whole, ended = (write("digits", engine, folder / name, 2, {"width": "8"}) for name in ("whole", "ended"))
    options = ["--epochs", str(epochs)]
    expected = result(whole, launch(whole, options, engine, 2, hidden=True))
    runtime = runtime_of(ended)
    text, counts = runtime.read_text(), "        self.done += 1\n"
    stops = Edit(counts, f"        if self.done == 20:\n            os._exit(0)\n{counts}")
    runtime.write_text(with_patches(text, stops))
    launch(ended, options, engine, 2, hidden=True)
    assert (
        not ended.with_name("weights.pt").exists()
        and torch.load(ended.with_name(f"{ended.stem}.checkpoint.pt"))["steps"] == 12
    )
    runtime.write_text(text)
    result(ended, launch(ended, options, engine, 2, hidden=True)).check_equal(expected)


@pytest.mark.parametrize("engine", [pytest.param(name, marks=FULL) for name in ("fsdp", "zero", "amp", "horovod")])
def test_other_engines_continue_from_a_checkpoint(engine: str, tmp_path: Path) -> None:
    skip_unless_here(engine)
    _check_continues(engine, tmp_path, epochs=2)


@pytest.fixture(scope="module")
def without_samestep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a virtual one that has all that is installed here but samestep."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for installed in {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}:
        for each in installed.iterdir():
            if "samestep" not in each.name:
                (packages / each.name).symlink_to(each)
    horovodrun = Path(sys.executable).with_name("horovodrun")
    if horovodrun.exists():
        _, _, text = horovodrun.read_text().partition("\n")
        (folder / "bin" / "horovodrun").write_text(f"#!{folder}/bin/python\n{text}")
        (folder / "bin" / "horovodrun").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = kept | {"PATH": f"{folder}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    imported = subprocess.run(["python", "-c", "import samestep"], env=environment, capture_output=True, text=True)
    assert "No module named 'samestep'" in imported.stderr
    return environment


@pytest.mark.check
@pytest.mark.parametrize("engine", [pytest.param("single", marks=FULL), "ddp", "horovod"])
def test_the_line_at_its_head_starts_it(engine: str, without_samestep: dict[str, str], tmp_path: Path) -> None:
    """As a user types it, where samestep is not installed."""
    skip_unless_here(engine)
    script = write("digits", engine, tmp_path / "script", 2, DIGITS)
    line = next(line.strip() for line in script.read_text().split("\n") if line.startswith("    "))
    assert line.endswith(script.name)
    done = subprocess.run(
        line, shell=True, cwd=script.parent, env=without_samestep, capture_output=True, text=True, timeout=budget()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result(script, done.stdout).check_equal(run_own("digits", engine, tmp_path / "own", 2, DIGITS))


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("ddp", {"every": "step"}),
        ("ddp", {"every": "epoch", "arch": "batchnorm"}),  # rank 0 too has a micro-batch without rows
        *(
            pytest.param(engine, {"every": every}, marks=in_turn(4, row, column))
            for row, engine in enumerate(OTHERS)
            for column, every in enumerate(("step", "epoch"))
        ),
    ],
)
def test_a_job_that_uses_everything(engine: str, more: dict[str, str], tmp_path: Path) -> None:
    skip_unless_here(engine)
    settings = {**EVERYTHING, **more}
    size = 2 if engine == "horovod" else 3  # it fuses tensors as they come, and a sum of three has an order
    script = write(DRAWN, engine, tmp_path / "script", size, settings)
    run_script(script, engine, size).check_equal(
        run_own(DRAWN, STANDS_FOR.get(engine, engine), tmp_path / "own", size, settings)
    )


CHOSEN = [
    ("ddp", {"order": "rank"}),
    ("ddp", {"compress": "fp16"}),
    ("ddp", {"compress": "powersgd", "bucket_mb": "0.5"}),
    ("ddp", {"static_graph": "true", "find_unused": "true"}),
    ("fsdp", {"wrap": "root", "reshard": "false"}),
    ("fsdp", {"precision": "bf16", "checkpoint": "true"}),
    ("deepspeed", {"stage": "3"}),
    ("fabric", {"strategy": "model_parallel"}),
    ("lightning", {"strategy": "model_parallel", "precision": "bf16"}),
    ("accelerate", {"precision": "bf16"}),
    ("horovod", {"compress": "fp16"}),
]


@pytest.mark.parametrize(
    ("engine", "chosen"),
    [pytest.param(*each, marks=in_turn(8, number)) for number, each in enumerate(CHOSEN)],
    ids=lambda value: str(value),
)
def test_an_engines_settings(engine: str, chosen: dict[str, str], tmp_path: Path) -> None:
    skip_unless_here(engine)
    script = write("digits", engine, tmp_path / "script", 2, DIGITS, **chosen)
    assert "partial(train, " in script.read_text()
    run_script(script, engine, 2).check_equal(run_own("digits", engine, tmp_path / "own", 2, DIGITS, **chosen))


@pytest.mark.parametrize(
    ("job", "wrap"),
    [pytest.param("returns_a_dict", "auto", marks=FULL), pytest.param("nanogpt", "Block", marks=CHECK)],
)
def test_units_and_a_metric_that_reads_the_batch(job: str, wrap: str, tmp_path: Path) -> None:
    target = f"{HERE.parents[1]}/conformance/jobs_of_scripts.py:{job}"
    script = write(target, "fsdp", tmp_path / "script", 2, {}, wrap=wrap)
    run_script(script, "fsdp", 2).check_equal(run_own(target, "fsdp", tmp_path / "own", 2, {}, wrap=wrap))
