"""The house: which room may import which, on which side of the process boundary it is, and how large its files are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from budget import budget

PACKAGE = Path(__file__).parents[1] / "src" / "samestep"
Sources = Mapping[str, str]  # 'room/file.py' -> its text

# room -> the rooms it may import. FREE ones are free to all. A room that is not here may import nothing.
ARROWS = {
    # the parent: the process that the user types
    "__main__": {"commands"},
    "commands": {"doctor", "engine", "judge", "launch", "proof", "report", "records", "rules", "world"},
    "launch": {"records", "world"},
    "proof": {"engine", "records"},
    "judge": {"proof", "records", "rules"},
    "report": {"records", "rules"},
    "rules": {"judge", "records"},  # a file each mistake, imported by its id
    "testing": {"launch", "records", "world"},  # the pytest plugin: pytest's process is the parent
    # both sides
    "__init__": {"commands", "data", "records", "recorder"},  # recorder: samestep.watch, imported when it is asked for
    "engine": {"world"},
    "records": {"engine", "world"},
    "world": set(),
    "doctor": {"records", "world"},
    "job": set(),
    "bounds": set(),
    "errors": set(),
    "message": set(),
    "version": set(),
    # the child: where torch is
    "worker": {"tasks", "training", "recorder", "rank", "data", "records", "world", "engine"},
    "tasks": {"doctor", "reference", "training", "parallel", "rank", "data", "records", "world", "engine", "jobs"},
    "training": {"rank", "data", "records", "world"},
    "reference": {"engine", "records"},  # of the records only what it fills
    "engines": {"engine", "training", "parallel", "rank", "world"},
    "recorder": {"as_cpu", "rank", "world", "records"},  # attaches to a script that is not ours
    "as_cpu": {"rank", "world"},  # computes on CPUs what it computes on GPUs
    "parallel": {"data", "rank", "records", "world"},
    "rank": {"data", "world", "records"},
    "data": {"world"},
    "jobs": {"__init__", "data"},
}
PARENT = {"__main__", "commands", "judge", "launch", "proof", "report", "rules", "testing"}
BOTH = {"__init__", "bounds", "doctor", "engine", "records", "world", "job", "errors", "message", "version"}
FREE = {"bounds", "errors", "job", "message", "version"}
HEAVY = {"torch", "sklearn", "lightning", "accelerate", "deepspeed", "horovod", "transformers", "torchmetrics"}
HEAVY |= {"fairscale", "ray", "peft", "tensorboard", "torchvision", "wandb"}
PUBLIC = {"Arrays", "Batch", "ByLength", "ImageFolder", "Job", "LRSchedule", "Pipeline", "Recipe", "StepInfo", "Stream"}
PUBLIC |= {"Lanes", "Phase", "Weighted", "Windows"}
# Folders whose tests are with those of the room.
TESTED_ELSEWHERE = {"jobs/models", "tasks/eject/runtime"}
ROOT_MODULES, FILE_LINES, FUNCTION_LINES = 9, 600, 80
BESIDE = ("tests", "benchmarks", "examples", "museum", "docs")


def room(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


@cache
def tree(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def imports(text: str, lazy: bool = True) -> frozenset[str]:
    """The modules that a file imports, without those that only the type checker sees. lazy: also inside functions.

    import_module("NAME") counts as an import of NAME.
    """
    skipped: set[int] = set()
    for node in ast.walk(tree(text)):
        unseen: list[ast.stmt] = []
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            unseen = node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            unseen = [node]
        skipped |= {id(inner) for statement in unseen for inner in ast.walk(statement)}
    found: set[str] = set()
    for node in (node for node in ast.walk(tree(text)) if id(node) not in skipped):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {node.module} - {"samestep"}  # what is imported from it is known by its name
        elif isinstance(node, ast.Call) and _name_of(node.func) in ("import_module", "__import__"):
            found |= {
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    return frozenset(found)


def _name_of(function: ast.expr) -> str:
    """The last word of what is called: f of f(), and of a.f()."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def relative_imports(text: str) -> list[str]:
    """The statements of a file that import a module by dots: they hide which room it is in."""
    return [ast.unparse(node) for node in ast.walk(tree(text)) if isinstance(node, ast.ImportFrom) and node.level]


def rooms_of(imported: frozenset[str]) -> set[str]:
    found = {name.split(".")[1] for name in imported if name.startswith("samestep.")}
    found = {"__init__" if name in PUBLIC else name for name in found} - FREE
    return found | ({"__init__"} if "samestep" in imported else set())


def heavy_imports(imported: frozenset[str]) -> set[str]:
    """Those packages that import torch, or take as long; 'safetensors.torch' is torch."""
    found = {name.split(".")[0] for name in imported} & HEAVY
    return found | {"torch" for name in imported if ".torch" in name and not name.startswith("samestep.")}


def breaches(sources: Sources) -> Iterator[str]:
    """What is against the table, a sentence each."""
    for file, text in sources.items():
        here = room(file)
        if here not in ARROWS:
            yield f"{here} has no row in the table: decide which side of the boundary it is on"
            continue
        for statement in relative_imports(text):
            yield f"{file}: write the whole name of the module: {statement}"
        for other in sorted(rooms_of(imports(text)) - {here} - ARROWS[here]):
            yield f"{file}: {here} must not import {other}"
        heavy = heavy_imports(imports(text, here in PARENT))
        if here in PARENT | BOTH and heavy:
            yield f"{file}: {here} must not import {min(heavy)}"
        if here == "engines" and file != "engines/__init__.py":
            others = {f"samestep.engines.{room(name.partition('/')[2])}" for name in sources if room(name) == "engines"}
            others = others - {f"samestep.engines.{Path(file).stem}"} | {"samestep.engines"}
            for other in sorted(others & imports(text)):
                yield f"{file}: an engine must not import another, {other}"
    yield from circles(sources)


def circles(sources: Sources) -> Iterator[str]:
    """Modules that import one another; a package's own name counts only where no module of it is meant."""
    names = {dotted(file): file for file in sources}
    edges = {
        name: {found for found in map(lambda other: nearest(other, names), imports(sources[file])) if found} - {name}
        for name, file in names.items()
    }
    for name in edges:
        packages = {other for other in edges[name] if any(inner.startswith(f"{other}.") for inner in edges[name])}
        edges[name] -= packages
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        elif name not in done:
            for other in sorted(edges[name]):
                yield from visit(other, (*path, name))
            done.add(name)

    for name in sorted(names):
        yield from visit(name, ())


def dotted(file: str) -> str:
    return "samestep." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def nearest(name: str, names: Mapping[str, str]) -> str:
    """The module that is imported with a name: itself, or the one that holds it."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


@pytest.fixture(scope="module")
def sources() -> Sources:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}


def test_every_arrow_is_in_the_table(sources: Sources) -> None:
    assert list(breaches(sources)) == []


@pytest.mark.parametrize("here", ARROWS)
def test_a_planted_arrow_is_found(here: str, sources: Sources) -> None:
    """For each row: every room that is not in it, in a function where it could hide."""
    file = next(file for file in sources if room(file) == here)
    for other in sorted(set(ARROWS) - ARROWS[here] - FREE - {here, "__init__"}):
        planted = f"def planted() -> None:\n    import samestep.{other}\n"
        assert f"{file}: {here} must not import {other}" in list(breaches({file: planted})), other


@pytest.mark.parametrize("here", sorted(PARENT | BOTH))
def test_planted_torch_is_found(here: str, sources: Sources) -> None:
    file = next(file for file in sources if room(file) == here)
    line = "def planted() -> None:\n    import torch\n" if here in PARENT else "import torch\n"
    found = list(breaches({file: line}))
    assert f"{file}: {here} must not import torch" in found


@pytest.mark.parametrize(
    ("file", "line", "says"),
    [
        (
            "engines/amp.py",
            "from samestep.engines import ddp",
            "an engine must not import another, samestep.engines.ddp",
        ),
        ("engines/amp.py", "import samestep.engines as e", "an engine must not import another, samestep.engines"),
        ("rank/meter.py", "import samestep\nsamestep.verify", "rank must not import __init__"),
        ("rank/meter.py", "from samestep import verify", "rank must not import verify"),
        ("launch/end.py", "from safetensors.torch import load_file", "launch must not import torch"),
        ("job/batch.py", "import torchvision", "job must not import torchvision"),
        ("newroom/x.py", "", "newroom has no row in the table"),
        (
            "report/page.py",
            "from ..tasks import answer",
            "write the whole name of the module: from ..tasks import answer",
        ),
        ("report/page.py", "from . import plots", "write the whole name of the module: from . import plots"),
        ("report/page.py", "import importlib\nimportlib.import_module('torch')", "report must not import torch"),
        ("rank/meter.py", "__import__('samestep.commands.api')", "rank must not import commands"),
        (
            "reference/play.py",
            "if TYPE_CHECKING:\n    pass\nelse:\n    import samestep.data.loader",
            "reference must not import data",
        ),
        ("reference/play.py", "if TYPE_CHECKING:\n    import samestep.data.loader", None),
        ("world/processes.py", "import samestep.world.network as n", None),
        (
            "world/network.py",
            "import samestep.world.connections",
            "connections -> samestep.world.network",
        ),
    ],
)
def test_other_breaches_are_found(file: str, line: str, says: str | None, sources: Sources) -> None:
    more = {"world/connections.py": sources["world/connections.py"] + "\nimport samestep.world.network\n"}
    planted = {**sources, **more, file: f"{sources.get(file, '')}\n{line}\n"}
    found = list(breaches(planted))
    assert any(says in sentence for sentence in found) if says else found == []


def too_large(texts: Mapping[str, str]) -> dict[str, int]:
    """The files and functions with more lines than they may have."""
    files = {file: text.count("\n") for file, text in texts.items()}
    functions = {
        f"{file}:{node.name}": node.end_lineno - node.lineno + 1
        for file, text in texts.items()
        for node in ast.walk(tree(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    large = {file: lines for file, lines in files.items() if lines > FILE_LINES}
    return large | {name: lines for name, lines in functions.items() if lines > FUNCTION_LINES}


def test_the_house_is_of_a_readable_size(sources: Sources) -> None:
    """And what is beside the package."""
    assert sum("/" not in file for file in sources) <= ROOT_MODULES
    root = Path(__file__).parents[1]
    beside = [path for folder in BESIDE for path in (root / folder).rglob("*.py")]
    assert too_large({**sources, **{str(path.relative_to(root)): path.read_text() for path in beside}}) == {}
    assert too_large({"a.py": "\n" * 601, "b.py": "def f():\n" + "    1\n" * 80}) == {"a.py": 601, "b.py:f": 81}


def test_each_folder_has_its_tests(sources: Sources) -> None:
    folders = {str(Path(file).parent) for file in sources if "/" in file} - TESTED_ELSEWHERE
    tests = Path(__file__).parent
    assert sorted(folder for folder in folders if not [*(tests / folder).glob("test_*.py")]) == []


def test_a_worker_imports_no_sharding() -> None:
    """torch.distributed.tensor brings sympy, and takes as long as torch: each rank and each inspection would wait."""
    seen = "{'torch.distributed.tensor', 'sympy'} & {*sys.modules}"
    code = f"import gc, sys, samestep.worker; print({seen}, gc.isenabled(), gc.get_freeze_count() > 100_000)"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=budget(20), check=True
    )
    # And a collection of garbage does not look through what torch has created (samestep.rank.import_torch).
    assert done.stdout.strip() == "set() True True"


def test_the_parent_never_imports_torch(tmp_path: Path) -> None:
    """A whole comparison, in a process where importing torch is an error."""
    script = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *_):\n"
        "        assert name.split('.')[0] not in ('torch', 'sklearn'), 'the parent imports ' + name\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from samestep.commands.cli import main\n"
        f"sys.argv = ['samestep', 'compare', '--nproc', '1', '--engines', 'single', '--rounds', '1', "
        f"'--measured-steps', '5', '--launcher', 'fork', "
        f"'--deadline', '{budget():.0f}', '--out', {str(tmp_path / 'out')!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=budget(90))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").exists()
