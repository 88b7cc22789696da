"""What stays of an engine's file: an engine that has, in few lines, what engines of other packages may have."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from samestep import LRSchedule, Recipe
from samestep.errors import UserError
from samestep.job import Job
from samestep.tasks.eject.loop import Loop

ENGINE = """
import functools
from samestep.errors import Refused

UNIT = 2
SCALE = UNIT * 3
OTHER = 4

@functools.cache
def scaled(x):
    return SCALE * x

def unused(x):
    return OTHER

def train(job, world, run, *, compile=False, mode="a", depth=1):
    if depth > 5 and run.schedule.micro_batches > 1:
        raise Refused(f"depth is {depth}, of {job.seed}")
    if world.size > 9:
        raise Refused("too many")
    if world.device == "cpu":
        raise Refused("no cpu")
    else:
        gpu = scaled(1)
    if world.rank == 0:
        first(mode)
    elif compile:
        second()
    elif world.rank == 1:
        third()
    else:
        fourth()
    if compile:
        fifth()
    elif world.rank == 1:
        sixth()
    trained = run.compile(
        model) if compile else (
        model.of(mode)
    )

    @functools.cache
    def inner(mode_of):
        return "é", f"{depth}", depth, mode
    for batch in run.batches():
        run.loss(model, batch) * run.schedule.micro_batches
        if job.moves_lr(batch):
            before.step()
        if batch.completes_step:
            step(moved=job.moves_lr(batch))
            if job.moves_lr(batch) and not compile and (compile or skipped != 1 or known):
                scheduler.step()
            run.step(loss)
        if job.moves_lr(batch):
            after.step()
"""


@pytest.fixture
def engine(tmp_path: Path) -> ModuleType:
    path = tmp_path / "engine_of_another.py"
    path.write_text(ENGINE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def sources(engine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, engine.__name__, engine)


def _text(engine: ModuleType, every: str = "", micro_batches: int = 2, **settings: object) -> str:
    scheduler = LRSchedule(None, every) if every else None  # type: ignore[arg-type]
    job = Job(None, None, Recipe(None), [], 1, scheduler=scheduler)  # type: ignore[arg-type]
    return Loop(engine, job, {"compile": False, "mode": "a", "depth": 1, **settings}, micro_batches).text()


LOOP = """UNIT = 2
SCALE = UNIT * 3


def train(job, world):
    if world.device == "cpu":
        pass
    else:
        gpu = scaled(1)
    if world.rank == 0:
        first("a")
    elif world.rank == 1:
        third()
    else:
        fourth()
    if world.rank == 1:
        sixth()
    trained = model.of("a")

    @functools.cache
    def inner(mode_of):
        return "é", f"{depth}", 1, "a"

    for batch in batches(job, world):
        loss_of(job, world, model, batch)BY_MICRO
WHEN

@functools.cache
def scaled(x):
    return SCALE * x"""
WHEN = {
    ("", 1): "step(moved=False)",
    ("", 2): "if batch.completes_step:\n    step(moved=False)",
    ("step", 1): "before.step()\nstep(moved=True)\nif skipped != 1 or known:\n    scheduler.step()\nafter.step()",
    ("step", 2): """if batch.completes_step:
    before.step()
if batch.completes_step:
    step(moved=True)
    if skipped != 1 or known:
        scheduler.step()
if batch.completes_step:
    after.step()""",
    ("epoch", 1): """if batch.completes_epoch:
    before.step()
step(moved=batch.completes_epoch)
if batch.completes_epoch and (skipped != 1 or known):
    scheduler.step()
if batch.completes_epoch:
    after.step()""",
    ("epoch", 2): """if batch.completes_epoch:
    before.step()
if batch.completes_step:
    step(moved=batch.completes_epoch)
    if batch.completes_epoch and (skipped != 1 or known):
        scheduler.step()
if batch.completes_epoch:
    after.step()""",
}


@pytest.mark.parametrize(("every", "micro_batches"), WHEN)
def test_what_a_job_leaves_of_a_loop(every: str, micro_batches: int, engine: ModuleType) -> None:
    when = "\n".join(" " * 8 + line for line in WHEN[every, micro_batches].split("\n"))
    expected = LOOP.replace("WHEN", when + "\n").replace("BY_MICRO", "" if micro_batches == 1 else " * 2")
    assert _text(engine, every, micro_batches) == expected


def test_a_setting_is_put_in_by_its_place(engine: ModuleType) -> None:
    text = _text(engine, compile=True, mode='"')
    assert "trained = run.compile(\n        model)\n" in text
    assert "first('\"')" in text
    assert "    else:\n        second()\n    fifth()\n" in text


def test_a_refusal_that_is_certain_is_ejects_own(engine: ModuleType) -> None:
    with pytest.raises(UserError, match="depth is 6, of 0"):
        _text(engine, depth=6)
    assert "Refused" not in _text(engine, micro_batches=1, depth=6)
