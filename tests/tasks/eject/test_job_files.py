"""Which files a script takes along: those beside the job that it imports, found by their place, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from budget import budget
from said import refuses, tells
from samestep.commands.script_files import write_script
from samestep.records.inspection import Script
from samestep.tasks.eject.job_files import JobFiles

JOB = "import json, torch\nfrom {imported} import model\nfrom samestep import Job\n\n\ndef job(): return Job()\n"


def loaded(path: Path, name: str) -> ModuleType:
    """A module of this name and file, whose code has not run."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    return importlib.util.module_from_spec(spec)


def files_of(folder: Path, *, imported: str, name: str = "my_job") -> dict[str, str]:
    path = folder / f"{name}.py"
    path.write_text(JOB.format(imported=imported))
    return {place: file.read_text() for place, file in JobFiles(loaded(path, name)).relative().items()}


def test_neighbours_are_found_where_they_lie_and_none_is_run(tmp_path: Path) -> None:
    """Even where Python itself lies below the job's folder, one of them is a link, and one would fail."""
    stands_for_python = tmp_path / "lib"
    stands_for_python.mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "json.py").symlink_to(Path(sys.modules["json"].__file__ or ""))
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets/deep.py").write_text("from old_run import model\n")
    (tmp_path.parent / "shared.py").write_text("raise SystemExit('it ran')\n")
    (tmp_path / "old_run.py").symlink_to(tmp_path.parent / "shared.py")
    found = files_of(tmp_path, imported="nets.deep")
    assert {*found} == {"my_job.py", "nets/deep.py", "old_run.py"}
    assert "it ran" in found["old_run.py"]


def test_a_neighbour_that_is_no_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text("def model(:\n")
    with refuses("imported_file_is_no_python", file=tmp_path / "nets.py", line=1):
        files_of(tmp_path, imported="nets")


@pytest.mark.parametrize("name", ["my.job", "__init__"])
def test_a_job_that_python_cannot_import_is_refused(name: str, tmp_path: Path) -> None:
    with refuses("job_file_name_cannot_be_imported", file=f"{name}.py"):
        files_of(tmp_path, imported="torch", name=name)


def test_all_files_are_written_or_none(tmp_path: Path) -> None:
    source = tmp_path / "job"
    (source / "nets").mkdir(parents=True)
    (source / "nets/deep.py").write_text("deep = 1\n")
    script = Script(
        {"train.py": "a\n", "samestep_ddp.py": "b\n"}, {"nets/deep.py": f"{source}/nets/deep.py"}, f"{source}"
    )
    out = tmp_path / "out"
    out.mkdir()
    (out / "nets").write_text("kept")
    with refuses("place_is_taken", path=out / "nets"):
        write_script(script, out / "train.py")
    assert [path.name for path in out.iterdir()] == ["nets"] and (out / "nets").read_text() == "kept"
    (out / "nets").unlink()
    write_script(script, out / "train.py")
    assert (out / "nets/deep.py").read_text() == "deep = 1\n" and (out / "samestep_ddp.py").exists()


FULL = """
import resource, sys
from pathlib import Path
from samestep.commands.script_files import write_script
from samestep.errors import UserError
from samestep.records.inspection import Script
from samestep.report import language
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    write_script(Script({"train.py": "a", "samestep_ddp.py": "b" * 200}, {}, "/"), Path(sys.argv[1]) / "train.py")
except UserError as error:
    print(error)
"""


def test_where_no_room_is_left_the_file_is_named_and_none_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=budget(20), check=True).stdout
    assert tells(said, "script_file_cannot_be_written", file=tmp_path / "samestep_ddp.py", error="File too large"), said
    assert not [*tmp_path.iterdir()]
