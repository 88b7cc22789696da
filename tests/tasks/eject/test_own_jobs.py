"""Users' jobs, written in the ways that Python allows, and the modules beside them: their scripts train the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import HERE, Came, launch, result, run_own, run_script, write
from written import BEGIN, DATA, END, IMPORT, JOB, LOSS, ROWS, SEED, Changes, written

from said import refuses
from samestep.data.schedule import schedule_of
from samestep.job import Job
from samestep.tasks.eject import eject
from samestep.tasks.eject.runtime import one
from samestep.tasks.inspect.load import build
from samestep.training import Run
from samestep.world import World

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
PART = """part = batch.micro_batch
    known = part.epoch, part.step, part.micro, part.rows, part.weight, part.share, SAMPLES[1][part.indices].sum()
    return F.cross_entropy(output, batch.targets) * (1 + sum(known))"""
CHECKED = "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
CHECKED += "import torch\nif TYPE_CHECKING:\n    from samestep import Batch\n"
STREAMED = "train=Stream(Rows(), 20), shuffle=False, workers=2, epochs=2,"
READ = """
class Rows:
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        return zip(*SAMPLES) if self.epoch == 0 else zip(*(tensor.flip(0) for tensor in SAMPLES))
SAMPLES ="""
TWENTY_FOUR = """SAMPLES = torch.linspace(-1, 1, 144).view(24, 6), torch.arange(24) % 2
def HALVED(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"""
CARRIES = """
def forward(model, batch):
    output = model(batch.inputs) + (0 if batch.state is None else batch.state)
    return output, output.tanh()
SAMPLES ="""

NAMES = """
def key(x):
    return x
train = start = enumerate = replace = name = SAMPLES ="""

SAME: dict[str, Changes] = {
    "as it is": [],
    "names that the script and the runtime module have": [
        (IMPORT, "import torch; OTHER = [\n    1]\nfrom math import *\nfrom math import sin as Tensor\n"),
        (BEGIN, NAMES),
        (LOSS, "return key(F.cross_entropy(output, batch.targets))"),
        (END, "if __name__ == '__main__':\n    from samestep import verify\nelse:\n    x = 1\n"),
        (END, "if 0:\n    from .conf import LR\n"),
    ],
    "samestep in a function": [(SEED, f"from samestep import Batch; assert Batch; {SEED}")],
    "another job of samestep's": [(END, "from samestep.jobs.digits import job as other\nassert other\n")],
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
    "what is needed when it is imported": [(BEGIN, "\nOF_ALL = Recipe(torch.optim.SGD, {'lr': 0.5})\nSAMPLES =")],
    "more of samestep": [
        (IMPORT, "import torch\nfrom samestep import Stream\nfrom samestep.errors import UserError\n"),
        (SEED, "assert Stream and UserError; torch.manual_seed(0)"),
    ],
    "samestep's version": [(END, "from samestep import __version__\n"), (SEED, "torch.manual_seed(len(__version__))")],
    "what the type checker sees": [(IMPORT, CHECKED), ("(output, batch)", "(output, batch: Batch)")],
    "a stream": [("import Job, Recipe", "import Job, Recipe, Stream"), (BEGIN, READ), (DATA, STREAMED)],
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
    "a collate of its own": [
        (DATA, "train=TensorDataset(*SAMPLES), collate=together,"),
        (BEGIN, "\ndef together(samples):\n    return [2 * torch.stack(x) for x in zip(*samples)]\nSAMPLES ="),
        (LOSS, LOSS.replace("batch.targets", "batch.targets // 2")),
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
    "a main that is asked for": [(END, "\n\ndef asked():\n    return main()\n\n\ndef main():\n    return job()\n")],
    "names of the script that nothing uses": [(END, UNUSED)],
    "a schedule that is not used": [
        ("Job, Recipe", "Job, LRSchedule, Recipe"),
        (ROWS, "scheduler=LRSchedule(None) if 0 else None, global_batch=8"),
    ],
    "values by their place": [(CALL, PLACED.format(SGD, FORWARD) + "\n")],
    "a job made from a job": [(END, REPLACED)],
    "a class of its own": [
        (END, f"class Mine(Job): ...\ndef asked():\n    return Mine({PLACED.format('SGD', FORWARD)[4:]}\n")
    ],
    "where a batch stands": [(LOSS, PART)],
    "a rate that moves with epochs whose rows divide evenly": [
        ("Job, Recipe", "Job, LRSchedule, Recipe"),
        ("SAMPLES = torch.linspace(-1, 1, 120).view(20, 6), torch.arange(20) % 2", TWENTY_FOUR),
        (ROWS, "global_batch=8, epochs=3, scheduler=LRSchedule(HALVED, every='epoch')"),
    ],
    "an average of the weights": [(ROWS, "global_batch=8, epochs=2, ema=0.9")],
    "an optimizer with a closure": [
        (CALL, PLACED.format("LBFGS, {'max_iter': 3, 'line_search_fn': 'strong_wolfe'}", "8, micro_batch=3") + "\n")
    ],
    "carried state": [
        ("import Job, Recipe", "import Job, Lanes, Recipe"),
        (BEGIN, CARRIES),
        (ROWS, "global_batch=4, epochs=2, carry_state=True, order=Lanes(), last='drop', forward=forward"),
    ],
    "rows in their order": [(ROWS, "global_batch=8, epochs=2, shuffle=False")],
    "micro-batches": [(ROWS, "global_batch=8, micro_batch=3, last='drop', epochs=2")],
}


def own(target: str, **settings: str) -> Came:
    """What samestep's own `single` comes to, in this process."""
    job, threads = build(target, settings), torch.get_num_threads()
    torch.set_num_threads(1)
    run = Run(job, World(), job.epochs * schedule_of(job, 1).steps_per_epoch)
    from samestep.engines import single

    state = single.train(job, World(), run)
    torch.set_num_threads(threads)
    return Came(state, None)


@pytest.mark.parametrize("case", SAME)
def test_the_script_is_the_job(case: str, tmp_path: Path) -> None:
    target = written(tmp_path, SAME[case])
    script = write(target, "single", tmp_path / "script", 1, {})
    file = Path(target.partition(":")[0])
    assert (script.parent / file.name).read_bytes() == file.read_bytes()
    run_script(script, "single", 1).check_equal(own(target))


def test_an_option_that_makes_a_job_with_other_parts(tmp_path: Path) -> None:
    given = [("job()", "job(clip: float = 0.0)"), (ROWS, "global_batch=8, clip_norm=clip or None")]
    target = written(tmp_path, given)
    script = write(target, "single", tmp_path / "script", 1, {})
    said = launch(script, ["--clip", "0.01"], "single", 1, hidden=True)
    result(script, said).check_equal(own(target, clip="0.01"))


def test_a_job_that_has_the_name_of_the_loop(tmp_path: Path) -> None:
    target = written(tmp_path, [(END, "\n\ndef train():\n    return job()\n")]) + ":train"
    run_script(write(target, "single", tmp_path / "script", 1, {}), "single", 1).check_equal(own(target))


@pytest.mark.parametrize("name", ["my-job", "größe", "class"])
def test_a_file_whose_name_is_no_name_of_pythons(name: str, tmp_path: Path) -> None:
    target = Path(written(tmp_path, []))
    target = target.rename(tmp_path / f"{name}.py")
    script = write(str(target), "single", tmp_path / "script", 1, {})
    run_script(script, "single", 1).check_equal(own(str(target)))


NET = """
import torch
from torch import nn
from samestep import Batch


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 2)
"""
BUILT = ("    torch.manual_seed(0)\n    return nn.Linear(6, 2)", "    return {}")


def beside(folder: Path, files: dict[str, str], line: str, call: str, *more: tuple[str, str]) -> str:
    """Writes a job whose model comes from a module beside it. '$' stands for what makes a name this test's own."""
    own_name = folder.name
    for name, text in files.items():
        file = folder / name.replace("$", own_name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.replace("$", own_name))
    changes = [(IMPORT, f"import torch\n{line}\n".replace("$", own_name)), (BUILT[0], BUILT[1].format(call)), *more]
    return written(folder, [(old, new.replace("$", own_name)) for old, new in changes])


BESIDE = {
    "a function": ({"net$.py": NET}, "from net$ import build", "build()"),
    "all of it": ({"net$.py": NET}, "from net$ import *", "build()"),
    "of one beside it": (
        {"net$.py": "from other$ import build\n\ndef made():\n    return build()\n", "other$.py": NET},
        "from net$ import made",
        "made()",
    ),
    "of a package": (
        {"net$/__init__.py": "from .inner import build\n", "net$/inner.py": NET},
        "from net$ import build",
        "build()",
    ),
    "a module": ({"net$.py": NET}, "import net$", "net$.build()"),
    "a module of a package": (
        {"net$/__init__.py": "", "net$/inner.py": NET},
        "from net$ import inner",
        "inner.build()",
    ),
    "of a folder": ({"net$/inner.py": NET}, "from net$.inner import build", "build()"),
    "one that looks for a file beside itself": (
        {"net$.py": f"HERE = __file__\nassert HERE.endswith('net$.py')\n{NET}"},
        "from net$ import build",
        "build()",
    ),
    "in a function": (
        {"net$.py": NET},
        "",
        "__import__('math') and made()\n\n\ndef made():\n    from net$ import build\n    return build()",
    ),
}


@pytest.mark.parametrize("case", BESIDE)
def test_a_module_beside_the_job_is_beside_the_script(case: str, tmp_path: Path) -> None:
    files, line, call = BESIDE[case]
    target = beside(tmp_path, files, line, call)
    script = write(target, "single", tmp_path / "script", 1, {})
    for name in files:
        place = name.replace("$", tmp_path.name)
        assert (script.parent / place).read_bytes() == (tmp_path / place).read_bytes()
        assert place in script.read_text().split('"""')[1]
    run_script(script, "single", 1).check_equal(own(written(tmp_path, [])))


def test_settings_of_every_job(tmp_path: Path) -> None:
    target = written(tmp_path, [])
    script = write(target, "single", tmp_path / "script", 1, {"micro_batch": "3"})
    assert "    start(replace(job(), micro_batch=3), train, checkpoint=checkpoint)\n" in script.read_text()
    run_script(script, "single", 1).check_equal(own(target, micro_batch="3"))


@pytest.mark.check
@pytest.mark.parametrize("job", ["jobs_carried.py:accumulated", "jobs_closures.py:averaged", "jobs_gathered.py:clip"])
def test_what_takes_more_than_a_plain_loop_on_ranks(job: str, tmp_path: Path) -> None:
    target = f"{HERE.parents[1]}/conformance/{job}"
    script = write(target, "ddp", tmp_path / "script", 2, {})
    assert ".checkpoint.pt" not in script.read_text()
    run_script(script, "ddp", 2).check_equal(run_own(target, "ddp", tmp_path / "own", 2, {}))


def test_shared_statistics_need_ranks_that_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("dataparallel", "horovod"):
        with refuses("script_batchnorm_finds_no_ranks", engine=engine):
            eject("digits", {"sync_batchnorm": "true"}, engine, {}, 2, "script.py")
    job = written(tmp_path, [(ROWS, "global_batch=8, sync_batchnorm=True")])
    assert "lone_batchnorm=True" in eject(job, {}, "dataparallel", {}, 2, "a.py").made["a.py"]
    assert "lone_batchnorm=True" not in eject(job, {}, "ddp", {}, 2, "a.py").made["a.py"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    synced: Job = build("digits", {"sync_batchnorm": "true"})
    with pytest.raises(SystemExit, match="SyncBatchNorm"):
        one.start(synced, lambda *_: {}, lone_batchnorm=True)  # type: ignore[arg-type]
