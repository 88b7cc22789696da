"""Every port of examples/ is what the coverage table of docs/porting.md says."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget
from command import samestep
from examples.table import EXAMPLES, LEARNT, PAGES, PORTS, ROOT, YES, Proven, newest, prove, read, rows_of
from lane_marks import FULL, in_turn

QUICK = ("plain",)
# What they do is another code where weights are sharded.
BOTH = ("plain", "nanogpt", "tagger", "clip", "moe", "ema", "dcgan", "lora")
LINES = 60  # of a port, beside its model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ports")


def check(found: Proven) -> None:
    assert {text.partition(" ")[0] for text in found.verdicts.values()} == {"same"}, found
    assert found.answer == PORTS[found.port].answer, found
    assert bool(found.reason) == (found.answer != YES), found


@pytest.mark.parametrize("name", QUICK)
def test_a_port_is_proven(name: str, folder: Path) -> None:
    check(prove(name, 2, ("ddp",), folder))


@pytest.mark.parametrize("name", [pytest.param(name, marks=in_turn(6, number)) for number, name in enumerate(LEARNT)])
def test_every_port_is_proven(name: str, folder: Path) -> None:
    """At 3 ranks, on DDP, or on its other engine where it does what is another code there; `make ports` proves each on
    all of its engines, at 2 ranks, too."""
    other = name in BOTH or "fsdp" not in PORTS[name].engines
    check(prove(name, 3, (PORTS[name].engines[-1] if other else "ddp",), folder))


def test_every_example_has_its_row() -> None:
    files = {PORTS[name].file.partition(":")[0] for name in LEARNT}
    written = {str(path.relative_to(EXAMPLES)) for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/job.py")]}
    assert files == written
    assert len(files) >= 16


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_port_is_short_beside_its_model(path: Path) -> None:
    """Its docstring, its imports, its classes and blank lines do not count."""
    module = ast.parse(path.read_text())
    left_out = [
        node
        for node in module.body
        if isinstance(node, ast.ClassDef | ast.Import | ast.ImportFrom | ast.Expr)  # a docstring is an expression
    ]
    skipped = {line for node in left_out for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = [line for number, line in enumerate(path.read_text().splitlines(), 1) if line and number not in skipped]
    assert len(lines) <= LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_coverage_table_is_that_of_its_record(page: Path) -> None:
    record = read(newest())
    assert "\n".join(rows_of(record)) in page.read_text()
    assert {each.port for each in record} == {*LEARNT}
    for found in record:
        check(found)


@FULL
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    """As shown, one after the other, in a folder that has examples/."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    lines = [line[4:] for line in PAGES[0].read_text().splitlines() if line.startswith("    ")]
    for line in lines:
        program, *words = shlex.split(line)
        if program == "samestep":
            done = samestep(*words, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert "same step" in done.stdout or "each once: loss" in done.stdout
        elif program == "python":
            command = [sys.executable, *words]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=budget())
            assert done.returncode == 0, done.stderr
            assert len(done.stdout) > 300
    assert (tmp_path / "runs" / "gpt" / "weights.safetensors").exists()


def test_the_records_name_no_folder() -> None:
    assert "/" not in json.dumps(json.loads(newest().read_text())["proven"]).replace("rows/", "")
