"""The current folder is on the search path of no process that samestep starts."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from budget import budget
from command import JOBS
from foreign_folder import assert_none_ran, foreign_folder
from samestep.world.imports import RUN_MODULE, module_arguments

SOURCE = Path(__file__).parents[2] / "src" / "samestep"
# Where `-m` is a word that a user types, or that a process was started with.
READ_M = {
    "world/imports.py",
    "world/become_worker.py",
    "commands/against.py",
    "commands/command_options.py",
    "commands/compared_sides.py",
    "recorder/run_script.py",
    "testing/same_training.py",
}
FORMS = {"this Python": module_arguments("shown"), "Python 3.10": ("-c", RUN_MODULE, "shown")}
SHOWN = """\
import json, random, socket, sys
print(json.dumps([__name__, __spec__.name, sys.modules["__main__"].__dict__ is globals(), sys.argv, sys.path]))
"""


def starts(text: str) -> Iterator[str]:
    """The places of a file that start Python otherwise than by module_arguments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.List | ast.Tuple):
            words = [ast.unparse(word) for word in node.elts]
            for word, after in zip(words, [*words[1:], ""]):
                if word == "sys.executable" and not after.startswith(("*module_arguments", "*program", "*head")):
                    yield f"line {node.lineno}: {word}, {after}"
        elif isinstance(node, ast.Constant) and node.value == "-m":
            yield f"line {node.lineno}: '-m'"


def test_every_place_that_starts_python_uses_it() -> None:
    files = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    found = dict[str, list[str]]()
    for file, text in files.items():
        if ("sys.executable" in text or "-m" in text) and "tasks/eject/runtime" not in file:
            found[file] = [*starts(text)]
    assert {file for file, places in found.items() if places} == READ_M, found
    scripts = [path for path in SOURCE.rglob("*.j2") if "python -m" in path.read_text()]
    assert not scripts
    assert sum("*module_arguments(" in text for text in files.values()) >= 9  # the search above finds what there is


@pytest.mark.parametrize("text", ["run([sys.executable, '-m', 'x'])", "x = (a, sys.executable, 'y.py')"])
def test_another_place_would_be_found(text: str) -> None:
    assert [*starts(text)]


@pytest.mark.parametrize("form", FORMS)
def test_a_module_runs_as_by_m_without_the_current_folder(form: str, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    folder = foreign_folder(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    line = [sys.executable, *FORMS[form], "a", "-b"]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=budget(20))
    assert done.returncode == 0, done.stderr
    name, spec, is_main, argv, path = json.loads(done.stdout)
    assert (name, spec, is_main, argv) == ("__main__", "shown", True, [str(tmp_path / "shown.py"), "a", "-b"])
    assert path[0] == str(tmp_path) and not {"", str(folder)} & {*path}
    assert_none_ran(folder)


def test_the_command_in_a_foreign_folder(tmp_path: Path) -> None:
    """`python -m samestep` takes the folder off the path itself; a faulty twin runs a file of it."""
    folder = foreign_folder(tmp_path)
    line = [sys.executable, "-m", "samestep", "run", f"{JOBS}:quick", "--nproc", "2", "--dry-run"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=budget(60))
    assert done.returncode == 0, done.stderr
    assert "samestep.worker" in done.stdout
    assert_none_ran(folder)
    done = subprocess.run([sys.executable, "-c", "import socket"], cwd=folder, capture_output=True, timeout=budget(20))
    with pytest.raises(AssertionError, match="socket"):
        assert_none_ran(folder)
