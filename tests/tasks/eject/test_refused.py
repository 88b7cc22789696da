"""What eject refuses, in one sentence: jobs that no script could hold, and names that would hide a package."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from written import END, IMPORT, Changes, written

from ranks import engine_facts
from said import refuses
from samestep import engine as engines
from samestep.commands.script_files import write_script
from samestep.engines import ddp
from samestep.errors import Refused, UserError
from samestep.message import message
from samestep.tasks.eject import eject
from samestep.tasks.eject.import_lines import Import, block
from samestep.tasks.eject.literals import literal
from samestep.tasks.eject.runtime import group, horovod, one
from samestep.tasks.inspect.load import build
from samestep.world.mesh import Mesh

REFUSED: dict[str, tuple[Changes, str, dict[str, str]]] = {
    "samestep itself": (
        [(IMPORT, "import torch\nimport samestep as ss\n")],
        "job_file_imports_samestep_whole",
        {"statement": "import samestep as ss"},
    ),
    "a module of samestep's": (
        [(END, "from samestep import errors\n")],
        "script_has_no_module",
        {"name": "errors", "module": "samestep"},
    ),
    "a command": ([(END, "from samestep import verify\n")], "script_has_no_command", {"name": "verify"}),
    "what samestep has not": (
        [(END, "if 0:\n    from samestep import nothing\n")],
        "script_has_no_module",
        {"name": "nothing", "module": "samestep"},
    ),
    "all of samestep": (
        [(END, "from samestep import *\n")],
        "job_file_imports_samestep_whole",
        {"statement": "from samestep import *"},
    ),
}


def _eject(target: str, engine: str = "single", chosen: dict[str, str] | None = None, **texts: str) -> str:
    return eject(target, texts, engine, engine_facts(engine, 2, chosen).settings, 2, "script.py").made["script.py"]


@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_no_script_can_hold(case: str, tmp_path: Path) -> None:
    changes, identity, fields = REFUSED[case]
    target = written(tmp_path, changes)
    with refuses(identity, **fields):
        _eject(target)


EVALUATED = "LRSchedule(torch.optim.lr_scheduler.ReduceLROnPlateau, every='evaluation')"
GLOBAL_BATCH = "global_batch=8"
UNTRAINED: dict[str, tuple[str, Changes, str, dict[str, Any]]] = {
    "phases": (
        "ddp",
        [
            ("import Job, R", "import Job, Phase, R"),
            ('optimizer=Recipe(torch.optim.SGD, {"lr": 0.5}),', ""),
            (GLOBAL_BATCH, "phases=[Phase('all', '', criterion, Recipe(torch.optim.SGD))], global_batch=8"),
        ],
        "script_cannot_train_parts",
        {"parts": ["phases"]},
    ),
    "evaluations that move the rate": (
        "ddp",
        [
            ("import Job, R", "import Job, LRSchedule, R"),
            (GLOBAL_BATCH, f"evaluation=TensorDataset(*SAMPLES), global_batch=8, scheduler={EVALUATED}"),
        ],
        "script_cannot_train_parts",
        {"parts": ["a scheduler with every='evaluation'"]},
    ),
    "outputs of Horovod's ranks": (
        "horovod",
        [(GLOBAL_BATCH, "global_batch=8, gather_outputs=True")],
        "script_of_engine_cannot_train_parts",
        {"engine": "horovod", "parts": ["gather_outputs"]},
    ),
    "an engine without closures": (
        "zero",
        [('SGD, {"lr": 0.5}', "LBFGS")],
        "script_of_engine_cannot_train_parts",
        {"engine": "zero", "parts": ["an optimizer whose step needs a closure"]},
    ),
}


@pytest.mark.parametrize("case", UNTRAINED)
def test_a_job_that_no_script_trains(case: str, tmp_path: Path) -> None:
    engine, changes, identity, fields = UNTRAINED[case]
    with refuses(identity, **fields):
        _eject(written(tmp_path, changes), engine)


def test_a_mesh_that_no_script_is_for(tmp_path: Path) -> None:
    def on(mesh: Mesh, engine: str, *changes: tuple[str, str]) -> str:
        folder = tmp_path / f"job{len([*tmp_path.iterdir()])}"  # a module of its own
        folder.mkdir()
        target = written(folder, [(IMPORT, "import torch\n"), *changes])
        facts = engine_facts(engine, mesh.size)
        return eject(target, {}, engine, facts.settings, mesh.size, "script.py", mesh).made["script.py"]

    with refuses("engine_does_not_take_axis", engine="ddp", axis="tensor"):
        on(Mesh(tensor=2), "ddp")
    with refuses("engine_does_not_take_axis", engine="single", axis="data"):
        on(Mesh(data=2), "single")
    with refuses("no_layer_can_be_split", kind=Refused):
        on(Mesh(tensor=5), "tensor")
    with pytest.raises(UserError, match="FileNotFoundError"):
        on(Mesh(tensor=2), "tensor", ("return Job(", "open('/no/data')\n    return Job("))
    with refuses("script_of_engine_cannot_train_parts", engine="tensor", parts=["gather_outputs"]):
        on(Mesh(tensor=2), "tensor", (GLOBAL_BATCH, "global_batch=8, gather_outputs=True"))


def test_a_job_that_cannot_be_built_here(tmp_path: Path) -> None:
    """Its data may be on another machine. Where it has a part that no script trains, the script says so."""
    text = _eject(written(tmp_path, [(IMPORT, "import torch\n"), ("return Job(", "open('/no/data')\n    return Job(")]))
    assert f"from of_{tmp_path.name} import job\n" in text
    job = build("digits", {})
    with pytest.raises(SystemExit, match="a script cannot train a job with batch_weight; train it with samestep"):
        one.start(replace(job, batch_weight=lambda batch: 1.0), lambda *_: {})  # type: ignore[arg-type]


def test_a_file_that_has_the_name_of_another(tmp_path: Path) -> None:
    target = written(tmp_path, [])
    facts = engine_facts("single", 1)
    for file in (Path(target).name, "samestep_single.py"):
        with refuses("script_needs_name_of_another_file", file=file):
            eject(target, {}, "single", facts.settings, 1, file)
    hiding = tmp_path / "antigravity.py"
    hiding.write_text(Path(target).read_text())
    with refuses("job_file_hides_a_module", module="antigravity"):
        eject(str(hiding), {}, "single", facts.settings, 1, "script.py")


def test_a_file_in_the_place_of_another_stays(tmp_path: Path) -> None:
    """What has the content that the script needs stays, too; where one has another content, nothing is written."""
    script = eject(written(tmp_path, []), {}, "single", engine_facts("single", 1).settings, 1, "train.py")
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "samestep_single.py").write_text("mine")
    with refuses("script_file_has_other_content", file=folder / "samestep_single.py"):
        write_script(script, folder / "train.py")
    assert [path.name for path in folder.iterdir()] == ["samestep_single.py"]
    (folder / "samestep_single.py").write_text(script.made["samestep_single.py"])
    write_script(script, folder / "train.py")
    assert {path.name for path in folder.iterdir()} == {*script.made, *script.copied}
    write_script(script, tmp_path / "train.py")  # beside the job's own file
    assert (tmp_path / "samestep_single.py").exists()


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        ("return 3", "job_returned_no_job"),
        ("raise SystemExit('no licence')", "job_raised_while_it_was_built"),
        ("torch.Tensr", "job_raised_while_it_was_built"),
    ],
)
def test_a_job_that_its_function_does_not_make(before: str, sentence: str, tmp_path: Path) -> None:
    """Its data on another machine would not mend it: the script would end alike."""
    changes = [(IMPORT, "import torch\n"), ("return Job(", f"{before}\n    return Job(")]
    with refuses(sentence):
        _eject(written(tmp_path, changes))


def test_a_setting_that_must_be_given_and_one_that_is_not_there(tmp_path: Path) -> None:
    target = written(tmp_path, [("job()", "job(rate)")])
    with refuses("job_needs_a_setting", name="rate"):
        _eject(target)
    with refuses("no_such_setting", name="rat", hint=message("did_you_mean", name="rate")):
        _eject(target, rat="1")


@pytest.mark.parametrize(
    ("setting", "text"),
    [("float", "1e-3"), ("str", 'a"b'), ("Path", "a/b"), ("int", "3")],
)
def test_settings_are_in_the_script(setting: str, text: str, tmp_path: Path) -> None:
    value = {"float": float, "str": str, "Path": Path, "int": int}[setting](text)  # type: ignore[operator]
    target = written(
        tmp_path, [(IMPORT, "import torch\nfrom pathlib import Path\n"), ("job()", f"job(x: {setting} = None)")]
    )
    script = _eject(target, x=text)
    option = re.search(rf'parser.add_argument\("--x", type={setting}, default=(.*)\)', script)
    called = option[1] if option else script.rpartition("start(job(x=")[2].rpartition("), train")[0]
    assert repr(eval(called, {"Path": Path})) == repr(value)
    assert ("import Path\n" in script) is (setting == "Path")


def test_a_setting_that_has_no_text() -> None:
    assert literal([1.0, float("inf")]) == '[1.0, float("inf")]'
    value = object()
    with refuses("script_cannot_hold_setting", value=repr(value), type="object"):
        literal(value)


@pytest.mark.parametrize("name", ["lightning", "torch", "sklearn", "json", "numpy"])
def test_a_name_that_hides_a_package_is_refused(name: str) -> None:
    facts = engine_facts("lightning", 2)
    with refuses("script_hides_a_package", file=f"{name}.py", package=name):
        eject("digits", {}, "lightning", facts.settings, 2, f"{name}.py")


@pytest.mark.parametrize(("start", "says"), [(group.start, "torchrun starts"), (horovod.start, "horovodrun starts")])
def test_a_script_that_is_started_by_itself(start: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "HOROVOD_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match=f"{says} this script: .* "):
        start(build("digits", {}), None)


ENGINE = '''
"""strange: an engine of another package."""
import functools
import statistics
from samestep.engine import Layout
from samestep.errors import Refused
from samestep.training import Run

UNIT = 2
SCALE = UNIT * 3
OTHER = 4
PROCESSES = "group"

def layout(world, **settings):
    return Layout(replicas=world.size)

# How much.
@functools.cache
def scaled(x):
    return SCALE * x

def unused(x):
    return statistics.mean(OTHER)

def train(job, world, run: Run, *, depth=1, mode="a"):
    if depth > 5:
        raise Refused("too deep")  # as it stands
    return scaled(depth)

def close():
    """Ends it."""
'''


def _strange(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    file = folder / "strange.py"
    file.write_text(text)
    module = ModuleType("strange")
    module.__file__ = str(file)
    exec(compile(text, str(file), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "strange", module)
    engine = engines.Engine("", module.train, module.layout, close=getattr(module, "close", None))
    monkeypatch.setattr(engines, "load", lambda _: engine)


def test_an_engine_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loop and what that needs stand as they are; the rest of its file is left out."""
    _strange(tmp_path, monkeypatch, ENGINE)
    script = eject("digits", {}, "strange", {"depth": 2, "mode": "a"}, 2, "script.py").made["script.py"]
    kept = ENGINE[ENGINE.index("# How much") : ENGINE.index("def unused")] + ENGINE[ENGINE.index("def close") :]
    assert all(part.strip() in script for part in kept.split("\n\n"))
    assert "UNIT = 2\nSCALE = UNIT * 3\n" in script and "import functools\n" in script
    assert not re.search("OTHER|def unused|import statistics|Layout|PROCESSES", script)
    assert "    start(job(**options), partial(train, depth=2), close=close, checkpoint=checkpoint)\n" in script


def test_an_engine_that_has_a_name_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _strange(tmp_path, monkeypatch, ENGINE.replace("scaled", "start"))
    with refuses("script_would_define_name_twice", name="start"):
        eject("digits", {}, "strange", {"depth": 2, "mode": "a"}, 2, "script.py")


def test_imports_stand_as_ruff_sorts_them() -> None:
    lines = [
        Import("torch", "", "th"),
        Import("torch", "", "torch"),
        Import("os", "path", "p"),
        Import("os", "sep", "sep"),
    ]
    text = block({line.bound: line for line in lines})
    assert text == "from os import sep\nfrom os import path as p\n\nimport torch\nimport torch as th"


def test_an_engine_whose_processes_no_script_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another package may bring one."""
    other = replace(ddp.ENGINE, needs=engines.Needs(processes="actors"))
    monkeypatch.setattr("samestep.engines.ddp.ENGINE", other)
    known = ["group", "horovod", "one", "ray"]
    with refuses("script_cannot_start_processes", engine="ddp", processes="actors", known=known):
        eject("digits", {}, "ddp", {}, 2, "train_digits.py")
