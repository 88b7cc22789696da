"""The docs are files that run: their jobs, their commands, their links, and both READMEs alike."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from budget import budget, deadline
from command import samestep
from neighbours import JOB, neighbours, words_of
from samestep import report
from samestep.records.results import CompareResults, read_results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
JOBS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(# my_job\.py\n.*?)```", page.read_text(), re.S)
    if page.name != "README.zh.md" and page.parent.name != "zh"  # whose blocks are the English pages': see below
]
SCRIPTS = {
    name: block
    for block, name in re.findall(
        r"```python\n(# (\w+\.py)\n.*?)```", (ROOT / "docs" / "pipeline.md").read_text(), re.S
    )
}


LEFT = """
import psutil
print("left:", [child.cmdline() for child in psutil.Process().children(recursive=True)])
"""


def _commands(page: Path) -> list[str]:
    """The indented lines of a page that are shell commands, without their comments."""
    lines = re.findall(r"^    ((?:samestep|make|git|\.) .*)$", page.read_text(), re.M)
    return [re.sub(r"\s+#.*$", "", line) for line in lines]


def test_both_readmes_say_the_same() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README.zh.md"
    assert _commands(english) == _commands(chinese)
    blocks = [re.findall(r"```.*?```", page.read_text(), re.S) for page in (english, chinese)]
    assert blocks[0] == blocks[1]
    assert len(blocks[0]) >= 2
    translated = chinese.read_text().replace("docs/zh/", "docs/")
    targets = [re.findall(r"\]\(([^)]+)\)", text) for text in (english.read_text(), translated)]
    assert sorted(targets[0][1:]) == sorted(targets[1][1:])  # the first is the link to the other language
    figures = [sorted(re.findall(r"\d[\d,.]*\d", page.read_text())) for page in (english, chinese)]
    assert figures[0] == figures[1]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


@pytest.mark.check
def test_the_silent_failure_of_the_readme_is_real() -> None:
    shown = re.search(r"^    \$ torchrun (.*); echo exit code \$\?\n    (.*)\n    exit code 0$", README, re.M)
    assert shown
    line = [sys.executable, "-m", "torch.distributed.run", *shown[1].split()]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=budget())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == shown[2]


@pytest.mark.parametrize(
    "name", ["check", "collectives", "glossary", "job", "monitor", "porting", "proof", "python", "security"]
)
def test_a_translated_page_says_the_same(name: str) -> None:
    """Its code, commands, links and figures. The table of planted faults is in the English page alone."""
    english, chinese = (ROOT / folder / f"{name}.md" for folder in ("docs", "docs/zh"))
    texts = [re.sub(r"^\|.*\| `[\w/]+\.py` \|.*\n", "", page.read_text(), flags=re.M) for page in (english, chinese)]
    for pattern in (r"```.*?```", r"^    \S.*$", r"https?://[^)]+"):
        found = [sorted(re.findall(pattern, text, re.S if "```" in pattern else re.M)) for text in texts]
        assert found[0] == found[1], pattern
    figures = [sorted(re.findall(r"\d[\d,.]*\d", text)) for text in texts]
    assert figures[0] == figures[1]


def test_the_readmes_table_is_that_of_its_record() -> None:
    (folder,) = set(re.findall(r"results/demo[^/)`]+", (ROOT / "README.md").read_text()))
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(report.table(read_results(CompareResults, ROOT / folder)))
    shown = [line.rstrip() for line in console.file.getvalue().rstrip().splitlines()]  # type: ignore[attr-defined]
    assert "\n".join(shown) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_every_page_is_in_the_list_of_pages(folder: str) -> None:
    """And in Chinese the translated page, where there is one."""
    listed = (ROOT / folder / "README.md").read_text()
    pages = [path for path in (ROOT / folder).glob("*.md") if path.name != "README.md"]
    assert [path.name for path in pages if f"({path.name})" not in listed] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert not re.findall(r"@[A-Z_]+@|TODO|FIXME", page.read_text())


@pytest.mark.parametrize(("page", "block"), JOBS, ids=lambda value: value.name if isinstance(value, Path) else "")
def test_the_jobs_of_the_docs_are_proven(page: Path, block: str, tmp_path: Path) -> None:
    file = tmp_path / "my_job.py"
    file.write_text(block)
    done = samestep("verify", str(file), "--nproc", "2", "--engines", "ddp", *deadline(), out=tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "same step" in done.stdout


@pytest.mark.check
@pytest.mark.parametrize("name", ["images.py", "graph.py"])
def test_the_pipelines_scripts_run(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(SCRIPTS[name])
    done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=budget(90))
    assert done.returncode == 0, done.stderr
    assert not done.stderr


@pytest.mark.check
def test_the_code_of_python_md_runs(tmp_path: Path) -> None:
    """Its blocks one after the other, as cells of a notebook; and nothing is left running."""
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 5
    (tmp_path / "cells.py").write_text("\n".join(blocks) + LEFT)
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=budget(90)
    )
    assert done.returncode == 0, done.stderr
    shown = [
        line.removeprefix("    ") for line in page.splitlines() if line.startswith("    ddp same") or "'dpp'" in line
    ]
    assert all(line in done.stdout for line in shown) and len(shown) == 2
    assert "left: []" in done.stdout


@pytest.mark.check
def test_the_readmes_job_is_trained_and_evaluated_as_shown(tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_text(next(block for page, block in JOBS if page.name == "README.md"))
    for begin in ("samestep run my_job.py --engine", "samestep evaluate"):
        # The first of each: another shows one more option.
        command = next(line for line in _commands(ROOT / "README.md") if line.startswith(begin))
        line = [sys.executable, "-m", *command.split()]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=budget(90))
        assert done.returncode == 0, done.stderr
        assert "over 200 rows" in done.stdout
    assert (tmp_path / "runs" / "a" / "weights.safetensors").exists()


@pytest.mark.check
def test_the_test_of_testing_md_passes(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(# test_sum\.py\n.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.S)
    (tmp_path / "test_sum.py").write_text(block)
    line = [sys.executable, "-m", "pytest", "-p", "samestep.testing", "test_sum.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=budget())
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@cache
def _help(command: str) -> str:
    return samestep(command, "--help-all").stdout


@pytest.mark.parametrize("command", sorted({c for page in PAGES for c in _commands(page) if c.startswith("samestep")}))
def test_commands_have_the_options_that_are_shown(command: str) -> None:
    command = command.partition(" -- ")[0]  # after it stands another program
    words = command.split()
    shown = _help(words[1])
    ours = command.partition(".py ")[0] if words[1] == "check" else command  # the others are the script's own
    for option in re.findall(r"--[a-z-]+", ours):
        assert option in shown, f"{command}: samestep {words[1]} has no {option}"


def _documented() -> list[str]:
    """Every samestep command of the docs: lines of their own and those within sentences. Decisions tell of the past."""
    texts = [page.read_text() for page in PAGES if page.parent.name != "decisions"]
    found = [line for text in texts for line in re.findall(r"^(?:    )?(?:\$ )?(samestep .*)$", text, re.M)]
    found += [line for text in texts for line in re.findall(r"`(samestep [^`…]*)`", text)]
    commands = {" ".join(re.sub(r"\s+#.*$", "", line).split()) for line in found}
    return sorted(command for command in commands if command.isascii())  # else a sentence that begins with the name


@pytest.mark.check
@pytest.mark.parametrize("depth", [[], pytest.param(["--whole"], marks=pytest.mark.full)], ids=["engines", "whole"])
def test_commands_with_other_values_start_or_are_refused_in_a_sentence(depth: list[str], tmp_path: Path) -> None:
    """Each number one less, one more, none and huge; each engine and axis another; each option left out."""
    commands = _documented()
    assert "samestep verify JOB --engine ddp --nproc 2 --resume --resume-nproc 3 --resume-engine fsdp" in commands
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "neighbours.py"), str(tmp_path), *depth],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=budget(300),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["wrong"] == {}
    assert min(told["ends"][end] for end in ("launched", "refused")) > len(commands), told["ends"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with my_job.py, and weights that it has trained."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "my_job.py").write_text(JOB)
    done = samestep("run", "my_job.py", "--engine", "single", cwd=folder, out=folder / "runs" / "a")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.check
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("verify my_job.py --engine ddp --nproc 3 --resume --resume-nproc 3 --resume-engine fsdp", 0),
        ("verify my_job.py --engine ddp --nproc 2 --resume --resume-nproc 4 --resume-engine fsdp", 0),
        ("verify my_job.py --engine ddp --nproc 2 --resume-nproc 3 --resume-engine fsdp", 0),
        ("verify my_job.py --engine fsdp --mesh data=2,shard=1", 0),
        ("verify my_job.py --engine ddp --nproc 17 --as threads", 0),
        ("run my_job.py --engine ddp --nproc 3 --set lr=0.05 --out runs/a", 2),
        ("run my_job.py --log csv", 0),
        ("evaluate my_job.py --weights runs/a/weights.safetensors --nproc 5", 0),
        ("eject my_job.py --to train.py", 0),
        ("collectives --show all_to_all --nproc 4", 0),
    ],
)
def test_a_command_with_another_value_runs_to_its_end(command: str, code: int, trained: Path) -> None:
    words = command.split()
    assert any(words in neighbours(words_of(documented)) for documented in _documented())
    done = samestep(*words, cwd=trained)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", sorted({c for page in PAGES for c in _commands(page) if c.startswith("make")}))
def test_make_has_the_targets_that_are_shown(command: str) -> None:
    assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)
