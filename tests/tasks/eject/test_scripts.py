"""An ejected script trains and evaluates as samestep does, to the last bit, where samestep cannot be imported."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import HERE, result, run_own, run_script, skip_unless_here, write

from command import DRAWN
from samestep import engine as engines

DIGITS = {"epochs": "1", "width": "8"}
LAUNCHED = {
    "single": [],
    "ddp": ["-m", "torch.distributed.run", "--nproc-per-node=2"],
    "horovod": [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable],
}
# Micro-batches, clipping, groups, weights, a last step that leaves a rank without rows.
EVERYTHING = {"rows": "29", "global_batch": "9", "micro_batch": "2", "clip_norm": "0.1", "weighted": "true"}
EVERYTHING |= {"optimizer": "groups", "arch": "deep"}
# An engine whose own training is the same to the bit, and needs no GPUs and no cluster.
STANDS_FOR = {"dataparallel": "single", "ray": "ddp"}
OTHERS = [engine for engine in engines.names() if engine not in ("dataparallel", "ddp")]


@pytest.mark.parametrize("engine", engines.names())
def test_digits_is_the_same_training(engine: str, tmp_path: Path) -> None:
    skip_unless_here(engine)
    script = write("digits", engine, tmp_path / "script", 2, DIGITS)
    own = STANDS_FOR.get(engine, engine)
    run_script(script, engine, 2).check_equal(run_own("digits", own, tmp_path / "own", 2, DIGITS))


@pytest.mark.check
@pytest.mark.parametrize("engine", LAUNCHED)
def test_the_line_that_it_tells_starts_it(engine: str, tmp_path: Path) -> None:
    """In processes of their own, as a user starts it."""
    skip_unless_here(engine)
    script = write("digits", engine, tmp_path / "script", 2, DIGITS)
    told = script.read_text().split('"""')[1].split("\n")[2].split()
    assert told[-1] == script.name and told[:-1] == [Path(w).name.replace("python3", "python") for w in _line(engine)]
    hides = os.environ | {"PYTHONPATH": str(HERE / "hides_samestep"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*_line(engine), script.name], cwd=script.parent, env=hides, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result(script, done.stdout).check_equal(run_own("digits", engine, tmp_path / "own", 2, DIGITS))


def _line(engine: str) -> list[str]:
    return [*([] if engine == "horovod" else [sys.executable]), *LAUNCHED[engine]]


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("ddp", {"every": "step"}),
        ("ddp", {"every": "epoch", "arch": "batchnorm"}),  # rank 0 too has a micro-batch without rows
        *(
            pytest.param(engine, {"every": every}, marks=pytest.mark.check)
            for engine, every in zip(OTHERS, itertools.cycle(("step", "epoch")))
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


@pytest.mark.check
@pytest.mark.parametrize(("engine", "chosen"), CHOSEN, ids=lambda value: str(value))
def test_an_engines_settings(engine: str, chosen: dict[str, str], tmp_path: Path) -> None:
    skip_unless_here(engine)
    script = write("digits", engine, tmp_path / "script", 2, DIGITS, **chosen)
    assert all(f", {name}=" in script.read_text().rpartition("start(")[2] for name in chosen)
    run_script(script, engine, 2).check_equal(run_own("digits", engine, tmp_path / "own", 2, DIGITS, **chosen))


@pytest.mark.check
@pytest.mark.parametrize(("job", "wrap"), [("returns_a_dict", "auto"), ("nanogpt", "Block")])
def test_units_and_a_metric_that_reads_the_batch(job: str, wrap: str, tmp_path: Path) -> None:
    target = f"{HERE.parents[1]}/conformance/jobs_of_scripts.py:{job}"
    script = write(target, "fsdp", tmp_path / "script", 2, {}, wrap=wrap)
    run_script(script, "fsdp", 2).check_equal(run_own(target, "fsdp", tmp_path / "own", 2, {}, wrap=wrap))
