"""Jobs that are no plain function: found under the name that was asked for, with the file that they stand in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inspected_job import inspected_job
from said import refuses
from samestep.message import message
from samestep.tasks.inspect.load import find, home, settings_of

TEXT = """
import functools
from samestep.jobs.digits import job
def _of(n):
    def job(): return globals()["plain"]()
    return job
def plain(width: int = 4): return job(width=width)
made = _of(1)
short = lambda: plain()
part = functools.partial(plain, width=2)
cached = functools.cache(plain)
class Callable_:
    def __call__(self, width: int = 4): return plain(width)
instance = Callable_()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kinds.py"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("name", ["plain", "made", "short", "part", "cached", "instance"])
def test_a_job_of_any_kind(name: str, path: Path) -> None:
    target = f"{path}:{name}"
    function = find(target)
    module, called = home(target, function)
    assert (Path(str(module.__file__)), called) == (path, name)
    given = {"width": "3"} if "width" in settings_of(function) else {}
    facts = inspected_job(target, given, 1, steps=1)
    assert facts.data.rows == 1500
    before = facts.source
    path.write_text(TEXT + "# changed\n")
    assert inspected_job(target, given, 1, steps=1).source != before


def test_a_change_beside_a_job_in_a_linked_package_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `flit install --symlink` and development installs link a package among the installed ones."""
    real, installed = tmp_path / "real" / "linked_jobs", tmp_path / "site-packages"
    real.mkdir(parents=True)
    installed.mkdir()
    (installed / "linked_jobs").symlink_to(real)
    (real / "__init__.py").touch()
    (real / "helper.py").write_text("WIDTH = 4\n")
    (real / "train.py").write_text(f"from .helper import WIDTH\n{TEXT}")
    monkeypatch.syspath_prepend(installed)
    before = inspected_job("linked_jobs.train:plain", {}, 1, steps=1).source
    (real / "helper.py").write_text("WIDTH = 5\n")
    assert inspected_job("linked_jobs.train:plain", {}, 1, steps=1).source != before


def test_a_job_of_another_file_stands_there(path: Path) -> None:
    module, called = home(f"{path}:job", find(f"{path}:job"))
    assert (module.__name__, called) == ("samestep.jobs.digits", "job")


SCRIPT = """
import torch
from pathlib import Path
Path(__file__).with_name("it-ran").touch()
def train(): ...
if True:
    train()
"""


def test_a_training_script_is_not_run(tmp_path: Path) -> None:
    script = tmp_path / "training_script.py"
    script.write_text(SCRIPT)
    hint = message("known_names", names=["train"])
    with refuses("job_file_has_no_function", file=str(script), function="job", hint=hint):
        find(str(script))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        hint = message("did_you_mean", name="train")
        with refuses("job_file_has_no_function", file="training_script", function="main", hint=hint):
            find("training_script:main")
    assert not (tmp_path / "it-ran").exists()


BOUND = {
    "import": "from samestep.jobs.digits import job",
    "star": "from samestep.jobs.digits import *",
    "assignment": "import samestep.jobs.digits as digits\njob = digits.job",
    "unpacked": "from samestep.jobs.digits import job as j\njob, other = j, 1",
    "block": "try:\n    from samestep.jobs.digits import job\nexcept ImportError:\n    raise",
    "global": "def bind():\n    global job\n    from samestep.jobs.digits import job\nbind()",
    "globals": "import samestep.jobs.digits as d\nglobals()['job'] = d.job",
    "asked for": "def __getattr__(name):\n    from samestep.jobs.digits import job\n    return job",
}


@pytest.mark.parametrize("kind", BOUND)
def test_a_job_that_is_bound_in_any_way_is_found(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"bound_{kind.replace(' ', '_')}.py"
    file.write_text(BOUND[kind])
    assert find(str(file)).__module__ == "samestep.jobs.digits"


def test_what_is_no_function_is_said(tmp_path: Path) -> None:
    file = tmp_path / "no_function.py"
    file.write_text("job = 3")
    with refuses("job_is_no_function", file=str(file), function="job", type="int"):
        find(str(file))


@pytest.fixture
def in_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder whose name is a package's, with a job and what it imports, as the current folder's neighbour."""
    name = f"package_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / f"model_{name}.py").write_text("WIDTH = 3\n")
    for job, line in {"beside": f"import model_{name} as m", "inside": f"from {name} import model_{name} as m"}.items():
        (folder / f"{job}_{name}.py").write_text(f"{line}\n{TEXT}\ndef width(): return m.WIDTH\n")
    monkeypatch.setattr(
        sys, "path", [path for path in sys.path if Path(path).is_absolute() and path != str(Path.cwd())]
    )
    monkeypatch.chdir(tmp_path)
    return name


def test_a_job_finds_its_neighbours_as_a_script_or_a_module_does(
    in_package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find(f"{in_package}.inside_{in_package}:width")() == 3
    monkeypatch.chdir("/")
    assert find(f"{tmp_path / in_package / f'beside_{in_package}.py'}:width")() == 3


def test_a_job_that_looks_in_the_current_folder_is_told_how(in_package: str) -> None:
    hint = message("module_is_in_the_current_folder", module=in_package)
    with refuses("job_does_not_import", hint=hint):
        find(f"{in_package}/inside_{in_package}.py:width")


def test_a_file_that_hides_a_module_of_pythons_own_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "turtle", raising=False)
    (tmp_path / "turtle.py").touch()
    (tmp_path / "hiding.py").write_text("from turtle import Turtle\ndef job(): pass\n")
    hint = message("file_hides_a_module_of_python", file=tmp_path / "turtle.py")
    with refuses("job_does_not_import", line=1, hint=hint):
        find(f"{tmp_path}/hiding.py:job")
    del sys.modules["turtle"]
