"""Every built-in job as a script, on small data of its own format."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import HERE, run_own, run_script, skip_unless_here, write

import samestep.jobs
from lane_marks import CHECK, in_turn
from samestep.tasks.inspect.load import builtin_names
from scripted_engines import SCRIPTED

sys.path.insert(0, str(HERE.parents[1] / "jobs"))
from test_jobs import SMALL, data, settings

__all__ = ["data"]  # the fixture
PROJECT = HERE.parents[2] / "pyproject.toml"
QUICK = [("imagefolder", "ddp")]  # the others take the longer lanes
EACH = [
    pytest.param(job, engine, marks=() if (job, engine) in QUICK else in_turn(2 * len(SMALL), column, row))
    for column, job in enumerate(SMALL)
    for row, engine in enumerate(SCRIPTED)
]
IMPORTS = "torchmetrics.text torchmetrics.classification transformers.models.bert.modeling_bert"  # in seconds


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, marks=CHECK if job == "digits" else in_turn(4, number))
        for number, job in enumerate(builtin_names())
    ],
)
def test_every_job_has_a_script_on_every_engine(job: str, tmp_path: Path) -> None:
    """Without its data: it is not built. Its file is beside it as it is."""
    for engine in SCRIPTED:
        script = write(job, engine, tmp_path, 2, {})
        made = {script: 350, tmp_path / f"samestep_{engine}.py": 2500}
        for file, most in made.items():
            assert not re.search(r"^\s*(from|import) samestep[ .]", file.read_text(), re.MULTILINE)
            assert file.read_text().count("\n") <= most
    copied = (tmp_path / f"{job}.py").read_bytes()
    assert copied == Path(samestep.jobs.__path__[0], f"{job}.py").read_bytes()
    (tmp_path / f"{job}.py").unlink()
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    assert ruff
    rules = ["--config", str(PROJECT)]
    for command in (["check", *rules], ["format", "--check", *rules]):
        checked = subprocess.run([ruff, *command, str(tmp_path)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(("job", "engine"), EACH)
def test_a_job_is_the_same_training(job: str, engine: str, data: dict[str, Path], tmp_path: Path) -> None:
    """cifar10 with its two loader processes, on some engines."""
    skip_unless_here(engine)
    chosen = {**settings(job, data), "epochs": "2"}
    if engine not in ("single", "ddp", "fsdp"):
        chosen["workers"] = "0"
    script = write(job, engine, tmp_path / "script", 2, chosen)
    own = {"dataparallel": "single", "ray": "ddp"}.get(engine, engine)
    imports = IMPORTS if job in ("charlm", "imdb") else ""
    run_script(script, engine, 2, imports).check_equal(run_own(job, own, tmp_path / "own", 2, chosen, imports))
