"""The museum's folders are whole, its tables say what its record holds, and an exhibit runs both ways."""

from __future__ import annotations

import ast
import difflib
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

MUSEUM = Path(__file__).parents[1] / "museum"
sys.path.insert(0, str(MUSEUM.parent))

from museum import run  # noqa: E402 - the museum is no part of the package
from museum.exhibit import Exhibit, exhibits, read  # noqa: E402

EXHIBITS = exhibits()
MOST_CHANGED = 12  # lines between the wrong and the right script


@pytest.mark.parametrize("of", EXHIBITS, ids=lambda of: of.name)
def test_an_exhibit_is_whole(of: Exhibit) -> None:
    files = {path.name for path in of.folder.iterdir()} - {"__pycache__"}
    scripts = {"train.py"} if of.pins else {"wrong.py", "right.py"}
    assert files == {"README.md", "exhibit.toml", *scripts, *(["job.py"] if of.command == "verify" else [])}
    for script in scripts:
        ast.parse((of.folder / script).read_text())
    if not of.pins:
        lines = [(of.folder / script).read_text().splitlines() for script in ("wrong.py", "right.py")]
        changed = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
        assert 0 < len(changed) <= MOST_CHANGED
    readme = (of.folder / "README.md").read_text()
    assert of.source in readme, "the README links to its source"
    assert of.source.startswith("https://")
    assert of.cause or of.why, "what must be named, or why it cannot be"
    assert len(readme) > 500


def test_a_key_that_is_not_known_or_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "exhibit.toml").write_text('titel = "x"\n')
    with pytest.raises(ValueError, match="no key 'titel'"):
        read(tmp_path)
    (tmp_path / "exhibit.toml").write_text('title = "x"\n')
    with pytest.raises(ValueError, match="kind"):
        read(tmp_path)


def test_the_tables_say_what_the_record_holds() -> None:
    rows = run.kept()
    assert [row.name for row in rows] == sorted(of.name for of in EXHIBITS)
    table = (MUSEUM / "README.md").read_text()
    assert f"**{run.summary(rows)}.**" in table
    assert run.markdown(rows) in table
    known = {of.name: of for of in EXHIBITS}
    for row in rows:
        of = known[row.name]
        assert run.shown(of, row) in (of.folder / "README.md").read_text(), row.name
        assert row.named or of.why, f"{row.name} is not named: say why"
        assert row.named == (row.caught and run.is_named(of, row.wrong)), row.name


def test_the_record_names_no_place_of_the_machine_that_made_it() -> None:
    text = (run.RECORD / "rows.json").read_text()
    assert "/tmp/" not in text and str(MUSEUM) not in text
    assert {*json.loads(text)[0]} == {field.name for field in fields(run.Row)}


def test_a_record_keeps_each_row_as_it_ends_in_place_of_an_older_one(tmp_path: Path) -> None:
    first, second = run.kept()[:2]
    for row in (second, first, replace(second, seconds=0.5)):
        run.keep(row, tmp_path)
    assert run.kept(tmp_path) == [first, replace(second, seconds=0.5)]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_a_bug_is_caught_and_named_and_its_right_version_is_right() -> None:
    row = run.run(read(MUSEUM / "schedule_each_micro_batch"))
    assert row.named and row.right.answer == "right", row


def test_the_engines_of_exhibits_are_declared() -> None:
    engines = [path for path in MUSEUM.glob("*/*.py") if "def train(job, world, run" in path.read_text()]
    assert engines
    for path in engines:
        assert "\nENGINE = Engine(" in path.read_text(), path


@pytest.mark.check
def test_a_bug_of_an_engine_is_named_and_its_right_version_is_right() -> None:
    command = [sys.executable, str(MUSEUM / "run.py"), "--only", "adam_moments_dropped"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "1 caught, 1 rightly named; 0 false alarms" in done.stdout, done.stdout + done.stderr
