"""A job written in the ways that Python allows: its script finds the reference's losses."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from written import BEGIN, DATA, END, IMPORT, JOB, LOSS, ROWS, SEED, Changes, write

from ranks import engine_facts
from samestep import reference
from samestep.data.schedule import schedule_of
from samestep.engine import Layout
from samestep.errors import UserError
from samestep.tasks.eject import eject
from samestep.tasks.inspect.load import build

PLACED = "Job(model, criterion, Recipe(torch.optim.{}), TensorDataset(*SAMPLES), {})"
SGD = "SGD, {'lr': 0.5}"
TWO_NAMES = "import torch as th\nimport torch\nimport numpy, numpy as np\n"
GUARDED = "\ntry:\n    import nothing_such\nexcept ImportError:\n    nothing_such = 0\nSAMPLES ="
DICTS = "train=[{'x': x, 'y': y} for x, y in zip(*SAMPLES)], forward=lambda m, b: m(b.inputs['x']),"
FACTORY = f"""
def _of(rows):
    def job():
        return {PLACED.format(SGD, "rows")}
    return job
asked = _of(5)
"""
PARTIAL = "import functools\nasked = functools.partial(job, rows=5)\n"
CACHED = "import functools\n@functools.cache\ndef asked():\n    return job()\n"
MAIN = """
def train():
    print(JOB_FOR_MAIN)
# Runs it by hand.
def main():
    train()
if __name__ == "__main__":
    raise SystemExit(main())
"""
UNUSED = "\ndef key():\n    return cut()\n\n\ndef cut():\n    return 1\n"
CALL = JOB[JOB.index("Job(\n") :]
FORWARD = "8, None, lambda m, b: -m(b.inputs)"
REPLACED = """
from dataclasses import replace
def asked():
    return replace(job(), global_batch=5, optimizer=replace(job().optimizer, settings={'lr': 0.1}))
"""
PART = """part = batch.part
    known = part.epoch, part.step, part.micro, part.rows, part.weight, part.share, SAMPLES[1][part.indices].sum()
    return F.cross_entropy(output, batch.targets) * (1 + sum(known))"""

SAME: dict[str, Changes] = {
    "as it is": [],
    "a module by two names": [(IMPORT, TWO_NAMES), (SEED, "th.manual_seed(len(np.zeros(0)) + len(numpy.zeros(0)))")],
    "two statements on a line": [
        (IMPORT, "import torch; th = torch; import math\n"),
        (SEED, "th.manual_seed(int(math.sin(0)))"),
    ],
    "other names for samestep's": [
        ("import Job, Recipe", "import Job as J, Recipe as R"),
        ("-> Job", "-> J"),
        ("Job(\n", "J(\n"),
        ("Recipe(", "R("),
    ],
    "an import that must wait": [
        (BEGIN, "\nimport sys\nsys.path.insert(0, '.')\nimport colorsys\nSAMPLES ="),
        (SEED, "torch.manual_seed(int(colorsys.ONE_SIXTH))"),
    ],
    "an import that is not there": [(BEGIN, GUARDED), (SEED, "torch.manual_seed(nothing_such)")],
    "text beyond ASCII": [(IMPORT, "'名'; import torch; 名 = torch\n"), ("torch.manual_seed", "名.manual_seed")],
    "a dict": [
        (DATA, DICTS),
        (LOSS, "assert batch.targets is None; return F.cross_entropy(output, batch.inputs['y'])"),
    ],
    "a tensor": [(DATA, "train=list(SAMPLES[0]),"), (LOSS, "return output.square().mean() + batch.inputs.mean()")],
    "a triple": [
        (DATA, "train=TensorDataset(*SAMPLES, SAMPLES[1]), forward=lambda m, b: m(b.inputs[0]),"),
        (LOSS, "return F.cross_entropy(output, batch.inputs[2])"),
    ],
    "a function of a function": [(END, FACTORY)],
    "a lambda": [(END, "asked = lambda: job()\n")],
    "a partial": [("job() -> Job", "job(rows) -> Job"), (ROWS, "global_batch=rows"), (END, PARTIAL)],
    "a cached function": [(END, CACHED)],
    "the file's own main": [(END, MAIN)],
    "names of the script that nothing uses": [(END, UNUSED)],
    "the optimizer's own settings": [('Recipe(torch.optim.SGD, {"lr": 0.5})', "Recipe(torch.optim.Adam)")],
    "a schedule that is not used": [
        ("Job, Recipe", "Job, LRSchedule, Recipe"),
        (ROWS, "scheduler=LRSchedule(None) if 0 else None, global_batch=8"),
    ],
    "values by their place": [(CALL, PLACED.format(SGD, FORWARD) + "\n")],
    "values from a dict": [(ROWS, "global_batch=8, **{'work' + 'ers': 0}")],
    "a job made from a job": [(END, REPLACED)],
    "a class of its own": [
        (END, f"class Mine(Job): ...\ndef asked():\n    return Mine({PLACED.format('SGD', FORWARD)[4:]}\n")
    ],
    "where a batch stands": [(LOSS, PART)],
    "rows in their order": [(ROWS, "global_batch=8, epochs=2, shuffle=False")],
    "micro-batches": [(ROWS, "global_batch=8, micro_batch=3, last='drop', epochs=2")],
}
PLACES = ("epoch", "step", "micro", "indices", "rows", "weight", "share", "completes_step", "completes_epoch")


def _losses(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    monkeypatch.chdir(folder)
    threads, said = torch.get_num_threads(), io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(path), run_name="__main__")
    torch.set_num_threads(threads)
    return [float(text) for text in re.findall(r"step \d+: loss (\S+)", said.getvalue())]


@pytest.mark.parametrize("case", SAME)
def test_the_script_is_the_job(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write(tmp_path, SAME[case])
    found = _losses(eject(target, {}, "single", {}, 2, "script.py"), tmp_path, monkeypatch)
    played = reference.play(build(target, {}), Layout(replicas=1), len(found))
    last = {part["step"]: part["loss"] for part in played["seen"][0]}
    assert len(found) > 1
    assert found == pytest.approx([last[step] for step in range(len(found))], rel=1e-5)


def test_shared_statistics_are_written_where_ranks_can_share_them(tmp_path: Path) -> None:
    target = write(tmp_path, [(ROWS, "global_batch=8, sync_batchnorm=True")])
    for name, size, times in (("ddp", 2, 1), ("ddp", 1, 0), ("single", 2, 0)):
        script = eject(target, {}, name, engine_facts(name, size)["settings"], size, "script.py")
        assert script.count("SyncBatchNorm.convert_sync_batchnorm(") == times
    with pytest.raises(UserError, match="SyncBatchNorm does not find the other ranks of dataparallel"):
        eject(target, {}, "dataparallel", {}, 2, "script.py")


WEIGHTED = "micro_batch=2, last='drop', weight=lambda i: i + 1"


@pytest.mark.parametrize("more", ["seed=2", "micro_batch=2", "last='drop'", WEIGHTED])
def test_a_batch_says_where_it_stands(more: str, tmp_path: Path) -> None:
    """As samestep's own does, on each of three ranks, one of which has no rows at an epoch's end."""
    told = ", ".join(f"batch.part.{name}" for name in PLACES)
    target = write(tmp_path, [(ROWS, f"global_batch=9, epochs=2, {more}"), (LOSS, f"{told}; {LOSS}")])
    path, job = tmp_path / "script.py", build(target, {})
    path.write_text(eject(target, {}, "ddp", engine_facts("ddp", 3)["settings"], 3, "script.py"))
    script, schedule = runpy.run_path(str(path)), schedule_of(job, 3)
    for rank in range(3):
        found = list(script["batches"](script["job"](), SimpleNamespace(rank=rank, size=3, device="cpu")))
        parts = list(schedule.parts(rank, 2 * schedule.steps_per_epoch))
        for batch, part in zip(found, parts, strict=True):
            for name in PLACES:
                mine, theirs = getattr(batch.part, name), getattr(part, name)
                assert mine == pytest.approx(theirs), name
                assert not isinstance(theirs, np.ndarray) or isinstance(mine, np.ndarray)
