"""Jobs that are no plain function: found under the name that was asked for, with the file that they stand in."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.tasks.inspect.job import inspect_job
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
    facts = inspect_job(target, given, 1, 1, "cpu")
    assert facts.rows == 1500
    before = facts.source
    path.write_text(TEXT + "# changed\n")
    assert inspect_job(target, given, 1, 1, "cpu").source != before


def test_a_job_of_another_file_stands_there(path: Path) -> None:
    module, called = home(f"{path}:job", find(f"{path}:job"))
    assert (module.__name__, called) == ("samestep.jobs.digits", "job")
