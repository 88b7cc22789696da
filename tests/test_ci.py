"""What `.ci/lanes.py` takes for green and for red: planted suites, each run by its own `make test` or `make check`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from budget import budget
from lane_marks import CHECK

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci/lanes.py"
spec = importlib.util.spec_from_file_location("ci_lanes", SCRIPT)
assert spec and spec.loader
lanes = importlib.util.module_from_spec(spec)
sys.modules["ci_lanes"] = lanes  # where dataclasses look for it
spec.loader.exec_module(lanes)

MAKEFILE = """
test check:
\t@.venv/bin/python -m pytest -p no:cacheprovider {options} $(PYTEST_MORE)
"""
CONFTEST = """
import os, pathlib, signal, sys, time
import pytest
pytest_plugins = ["outcomes"]
"""
HEALTHY = "def test_healthy(): pass\n"
FAILS_ONCE = """
def test_fails_once():
    marker = pathlib.Path("marker")
    had = marker.exists()
    marker.touch()
    assert had, "the first time"
"""
FAILS = "def test_fails(): assert False, 'always'\n"
XDIST, SIGNAL = "-p xdist -n 2 --dist loadfile", "-p pytest_timeout --timeout 0.3"


def planted(folder: Path, files: dict[str, str], options: str, conftest: str = "") -> Path:
    """A project with these files of tests, which pytest runs with these options."""
    files = {name: f"import os, pathlib, signal, time, pytest\n{textwrap.dedent(text)}" for name, text in files.items()}
    files |= {"conftest.py": CONFTEST + textwrap.dedent(conftest), "Makefile": MAKEFILE.format(options=options)}
    files |= {"pytest.ini": "[pytest]\nmarkers = check\n", "empty/pip.txt": ""}
    files |= {".venv/bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n', ".ci/lanes.py": SCRIPT.read_text()}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / ".venv/bin/python").chmod(0o755)
    return folder


def judged(folder: Path, lane: str = "check", more: Sequence[str] = ()) -> tuple[int, list[str]]:
    """The script's exit code, and what it says."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE", "MFLAGS"))}
    environment = inherited | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, ".ci/lanes.py", lane, *more]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=budget())
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("CI: ")]


GREEN = {
    "healthy": ({"test_a.py": HEALTHY, "test_b.py": HEALTHY}, XDIST, "is green"),
    "fails once": ({"test_a.py": HEALTHY + FAILS_ONCE}, "", "FLAKY: test_a.py::test_fails_once"),
    "a skip that is expected": (
        {"test_a.py": HEALTHY + "def test_b(): pytest.skip('ray is not installed')\n"},
        "",
        "is green",
    ),
}
CRASH = "def test_{0}(): os.kill(os.getpid(), signal.SIG{0})\n"
RED = {
    "fails twice": ({"test_a.py": HEALTHY + FAILS}, "", ["test_a.py::test_fails failed twice"]),
    "four fail": ({"test_a.py": "".join(FAILS.replace("fails", f"f{n}") for n in range(4))}, "", ["test_f3 failed"]),
    "too many fail": (
        {"test_a.py": "".join(FAILS.replace("fails", f"f{n:02}") for n in range(11))},
        "",
        ["test_f10 was collected, and never began"],
    ),
    "a crash": (
        {"test_a.py": HEALTHY, "test_b.py": "def test_b(): os._exit(0)\n"},
        XDIST,
        ["test_b.py::test_b crashed"],
    ),
    "a killed process": ({"test_a.py": HEALTHY, "test_c.py": CRASH.format("KILL")}, XDIST, ["test_KILL crashed"]),
    "no news of any test": (
        {"test_a.py": HEALTHY, "test_b.py": "def test_b(): time.sleep(600)\n"},
        XDIST,
        ["did not come to its end", "test_b.py::test_b began, and never ended"],
    ),
    "the process ends": (
        {"test_a.py": "def test_a(): os._exit(0)\n" + HEALTHY},
        "",
        ["test_healthy was collected, and"],
    ),
    "a hang": ({"test_a.py": HEALTHY + "def test_h(): time.sleep(60)\n"}, SIGNAL, ["test_a.py::test_h hung"]),
    "a hang that ends the process": (
        {"test_a.py": "def test_h(): time.sleep(60)\n" + HEALTHY},
        f"{SIGNAL} --timeout-method thread",
        ["test_a.py::test_h began, and never ended", "test_healthy was collected, and never began"],
    ),
    "an import error": (
        {"test_a.py": HEALTHY, "test_b.py": "import nothing\n"},
        XDIST,
        ["test_b.py was not collected"],
    ),
    "nothing is selected": ({"test_a.py": HEALTHY}, "-m check", ["no test was collected"]),
    "a wrong option": ({"test_a.py": HEALTHY}, "--no-such-option", ["did not come to its end"]),
    "skips": (
        {
            "test_a.py": HEALTHY + "def test_b(): pytest.skip('no mpirun')\n",
            "test_b.py": "pytest.skip('no horovod', allow_module_level=True)\n",
        },
        XDIST,
        ["test_b was skipped: no mpirun", "test_b.py was skipped: no horovod"],
    ),
}


@pytest.mark.parametrize("case", GREEN)
def test_a_green_run(case: str, tmp_path: Path) -> None:
    files, options, says = GREEN[case]
    code, said = judged(planted(tmp_path, files, options))
    assert code == 0 and said[-1].endswith("check is green"), said
    assert any(says in line for line in said) and any("FLAKY" in line for line in said) == ("FLAKY" in says), said


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=CHECK if case == "no news of any test" else ()) for case in RED],  # it waits
)
def test_a_red_run(case: str, tmp_path: Path) -> None:
    files, options, says = RED[case]
    code, said = judged(planted(tmp_path, files, options), more=["--stall", f"{budget(10):.0f}"])
    assert code == 1 and said[-1].endswith("check is red"), said
    for words in says:
        assert any(line.startswith("CI: RED: ") and words in line for line in said), said


def test_an_error_of_pytests_own_after_a_flaky_test(tmp_path: Path) -> None:
    """The flaky test alone would pass the second time; what never began must not be forgotten over it."""
    raises = "def pytest_runtest_logfinish(nodeid):\n    if 'fails_once' in nodeid: raise RuntimeError('planted')\n"
    for options in ("", XDIST):
        folder = planted(tmp_path / (options and "beside"), {"test_a.py": FAILS_ONCE + HEALTHY}, options, raises)
        code, said = judged(folder)
        assert code == 1, said
        assert any("INTERNALERROR" in line for line in said), said
        assert not options or any("test_healthy" in line for line in said), said


def test_what_make_itself_says(tmp_path: Path) -> None:
    """ruff and mypy run before the tests; an error at the end of make is none of a test's."""
    folder = planted(tmp_path, {"test_a.py": HEALTHY}, "")
    makefile = folder / "Makefile"
    for lines in (
        "\t@false\n" + MAKEFILE.format(options="").split(":\n")[1],
        makefile.read_text().split(":\n")[1] + "\t@false\n",
    ):
        makefile.write_text(f"test check:\n{lines}")
        code, said = judged(folder)
        assert code == 1 and any("RED: make check" in line and line.endswith("code 2") for line in said), said


def test_what_was_skipped_runs_again_with_everything_installed(tmp_path: Path) -> None:
    needs = "@pytest.mark.skipif(not os.path.exists('tool'), reason='no tool')\ndef test_tool(): {}\n"
    more = "if os.path.exists('tool'):\n    def test_more(): pass\n"
    folder = planted(tmp_path, {"test_a.py": HEALTHY + needs.format("pass") + more}, "")
    options = "pytest_plugins += ['xdist.plugin']\n"
    (folder / "conftest.py").write_text((folder / "conftest.py").read_text() + options)
    assert judged(folder, "test")[0] == 0
    code, said = judged(folder, "rest")
    assert code == 1 and any("test_tool was skipped" in line for line in said), said
    (folder / "tool").touch()
    code, said = judged(folder, "rest")
    assert code == 0, said
    (began,) = [line for line in said if "test_tool" in line]
    assert "test_more" in began and "test_healthy" not in began
    (folder / "test_a.py").write_text(
        (folder / "test_a.py").read_text().replace("test_tool(): pass", "test_tool(): 1 / 0")
    )
    assert judged(folder, "rest")[0] == 1


def test_no_time_for_some_tests() -> None:
    """A fifth may be left out where torch is slow to import, and none of the newest."""
    tests = {f"tests/test_{n}.py::test": "" for n in range(10)}
    left = lanes.LEFT_OUT + ": the minutes are over"

    def verdict(skipped: Sequence[int], newest: Sequence[int] = (), leaves_out: bool = True) -> lanes.Verdict:
        outcomes = lanes.Outcomes({*tests}, {*tests}, {*tests}, exit=0)
        outcomes.skipped = {f"tests/test_{n}.py::test": left for n in skipped}
        files = {f"tests/test_{n}.py" for n in newest}
        return lanes.judge(outcomes, skips=lanes.EXPECTED_SKIPS, leaves_out=leaves_out, newest=files)

    assert (verdict([1, 2]).red, len(verdict([1, 2]).left_out)) == ([], 2)
    assert "3 of 10" in str(verdict([1, 2, 3]).red)
    assert "test_2.py::test is new" in str(verdict([1, 2], newest=[2]).red)
    assert len(verdict([1, 2], leaves_out=False).red) == 2


def test_the_newest_tests_run_when_the_time_is_over(tmp_path: Path) -> None:
    folder = planted(tmp_path, {"test_new.py": HEALTHY, "test_old.py": HEALTHY}, "")
    more = "--minutes=0 --always=test_new.py --outcomes=written.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(["make", "check", f"PYTEST_MORE={more}"], cwd=folder, env=environment, check=True, timeout=budget())
    outcomes = lanes.read_outcomes(folder / "written.jsonl")
    assert outcomes.passed == {"test_new.py::test_healthy"}
    assert list(outcomes.skipped) == ["test_old.py::test_healthy"]
    assert lanes.judge(outcomes, skips=(), leaves_out=True).left_out == ["test_old.py::test_healthy"]


def test_the_newest_files_are_those_of_the_last_commits(tmp_path: Path) -> None:
    """Without git, and in a clone too shallow to tell, nothing is known to be old."""
    repository, shallow = tmp_path / "a", tmp_path / "b"
    repository.mkdir()
    assert lanes.newest_files(repository, 2) is None

    def git(*words: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(repository), *names, *words], check=True, capture_output=True)

    git("init")
    for name in ("one", "two", "three"):
        (repository / name).touch()
        git("add", ".")
        git("commit", "-m", name)
    assert lanes.newest_files(repository, 2) == {"two", "three"}
    git("clone", "--depth", "1", f"file://{repository}", str(shallow))
    assert lanes.newest_files(shallow, 2) is None
    assert shutil.which("git")
