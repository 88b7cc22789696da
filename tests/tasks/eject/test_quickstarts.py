"""Ejected scripts: current, short, free of samestep, and the same training as the reference."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command import DRAWN
from ranks import engine_facts
from samestep import engine as engines
from samestep import reference
from samestep.engine import Layout
from samestep.errors import UserError
from samestep.jobs import digits
from samestep.tasks.eject import eject
from samestep.tasks.inspect.load import build

QUICKSTARTS = Path(__file__).parents[3] / "quickstarts"
STEPS = 8
LINES = 120  # that are not blank, beyond the job's own


def _script(engine: str, settings: dict[str, str], **chosen: str) -> str:
    facts = engine_facts(engine, 2, chosen)
    return eject("digits", settings, engine, facts["settings"], 2, f"digits_{engine}.py")


@pytest.mark.parametrize("engine", engines.names())
def test_the_checked_in_script_is_current(engine: str) -> None:
    path = QUICKSTARTS / f"digits_{engine}.py"
    script = _script(engine, {})
    if "UPDATE" in os.environ:
        path.write_text(script)
    assert path.read_text() == script, "run this test once with UPDATE=1 in the environment"
    assert _lines(script) - _lines(inspect.getsource(digits)) <= LINES
    assert not re.search(r"^\s*(from|import) samestep", script, re.MULTILINE)


def _lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def _command(engine: str, script: Path, size: int) -> list[str]:
    processes = engines.load(engine).PROCESSES
    python = [sys.executable, str(script)]
    if processes == "one":
        return python
    if processes == "horovod":
        return [str(Path(sys.executable).with_name("horovodrun")), "-np", str(size), *python]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", str(script)]


def _losses(engine: str, script: str, folder: Path, size: int = 2) -> list[float]:
    path = folder / f"digits_{engine}.py"
    path.write_text(script)
    done = subprocess.run(_command(engine, path, size), cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (folder / "weights.pt").exists()
    return [float(text) for text in re.findall(r"step \d+: loss (\S+)", done.stdout)]


def _expected(settings: dict[str, str], layout: Layout) -> list[float]:
    played = reference.play(build("digits", settings), layout, STEPS)
    return [part["loss"] for part in played["seen"][0]]


@pytest.mark.parametrize("engine", engines.names())
def test_it_finds_the_references_losses(engine: str, tmp_path: Path) -> None:
    facts = engine_facts(engine, 2)
    if not facts["available"] and engine != "dataparallel":  # which does nothing on a CPU, and trains there too
        assert "CI" not in os.environ, facts["reason"]
        pytest.skip(facts["reason"])
    settings = {"epochs": "1"}
    shape = {"replicas": 1} if engine == "dataparallel" else {**facts["layout"]}
    shape.pop("every_gradient", None)
    found = _losses(engine, _script(engine, settings), tmp_path)
    tolerance = 2e-2 if facts.get("numerics", {}).get("lossy") else 1e-5
    assert len(found) == 24
    assert found[:STEPS] == pytest.approx(_expected(settings, Layout(**shape)), rel=tolerance)


EVERYTHING = {"rows": "29", "global_batch": "8", "micro_batch": "2", "clip_norm": "0.1", "weighted": "true"}
EVERYTHING |= {"optimizer": "groups"}
EACH = [(engine, "step") for engine in engines.names() if engine not in ("single", "dataparallel")]
EACH += [("amp", "epoch"), ("lightning", "epoch")]  # whose lines around the scheduler are unlike the others'


@pytest.mark.parametrize(("engine", "every"), EACH)
def test_a_job_that_uses_everything(engine: str, every: str, tmp_path: Path) -> None:
    """Micro-batches, clipping, a schedule, groups, weights, uneven data."""
    target = DRAWN
    settings = {**EVERYTHING, "every": every}
    facts = engine_facts(engine, 3)
    if not facts["available"]:
        assert "CI" not in os.environ, facts["reason"]
        pytest.skip(facts["reason"])
    script = eject(target, settings, engine, facts["settings"], 3, "everything.py")
    assert _lines(script) - _lines(Path(target.partition(":")[0]).read_text()) <= LINES
    found = _losses(engine, script, tmp_path, size=3)
    shape = {key: facts["layout"][key] for key in ("replicas", "split", "buffers")}
    played = reference.play(build(target, settings), Layout(**shape), 4)
    last = {part["step"]: part["loss"] for part in played["seen"][0]}
    tolerance = 2e-2 if facts["numerics"]["lossy"] else 1e-4
    assert found == pytest.approx([last[step] for step in range(4)], rel=tolerance)
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    assert ruff
    checked = subprocess.run([ruff, "check", str(tmp_path), "--select", "E9,F"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("name", ["lightning", "torch", "sklearn", "json", "numpy"])
def test_a_name_that_hides_a_package_is_refused(name: str) -> None:
    facts = engine_facts("lightning", 2)
    with pytest.raises(UserError, match=f"would hide the package {name}"):
        eject("digits", {}, "lightning", facts["settings"], 2, f"{name}.py")
