"""The arrows between the rooms: imports run downward only, and nothing above the process boundary imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "samestep"

# From the top. A module may import those below its own line, and none of its own line unless it is in a folder of it.
ABOVE = [
    {"__main__"},
    {"cli"},
    {"one_launch"},
    {"begin", "train"},
    {"compare"},
    {"follow"},
    {"measurement", "inquiry", "folder", "show"},
    {"study"},
    {"processes"},
    {"ending"},
    {"submit", "options", "surroundings"},
    {"verify", "report", "stats", "scaling", "waiting"},
    {"rounding"},
    {"comparison"},
    {"causes", "proof_plan"},
    {"gradient_causes"},
    {"trace"},
    {"launch"},
]
BELOW = [
    {"worker"},
    {"answers"},
    {"inspection", "referee"},
    {"eject", "watch", "fitting"},
    {"probe"},
    {"proof", "loading", "evaluate"},
    {"engines"},
    {"run", "process_group", "rendezvous"},
    {"rollcall", "stopping"},
    {"jobs"},
    {"data", "meter", "machine", "weights", "models"},
]
VALUES = [{"engine"}, {"record", "lifeline", "world", "network", "__init__"}, {"job"}, {"errors"}]
LINES = {name: number for number, line in enumerate(ABOVE + BELOW + VALUES) for name in line}
BOUNDARY = len(ABOVE)


def _modules() -> dict[Path, str]:
    """Each file and the room it belongs to: its own name, or its folder's."""
    return {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}


def _imports(path: Path, *, also_for_types: bool = True) -> set[str]:
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not also_for_types and id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _rooms(imported: set[str]) -> set[str]:
    return {name.split(".")[1] for name in imported if name.startswith("samestep.")} & set(LINES)


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    room = _modules()[path]
    assert room in LINES, f"{room} has no line in this test: decide who may import it"
    for other in _rooms(_imports(path, also_for_types=False)) - {room}:
        assert LINES[other] > LINES[room], f"{room} imports {other}, which stands above or beside it"
        crosses = LINES[room] < BOUNDARY <= LINES[other] < BOUNDARY + len(BELOW)
        assert not crosses, f"{room} imports {other} across the process boundary"


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_torch_above_the_boundary(path: Path) -> None:
    room = _modules()[path]
    if BOUNDARY <= LINES[room] < BOUNDARY + len(BELOW) or room == "jobs":
        return
    top_level = {node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)}
    names = {alias.name for node in top_level if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in top_level if isinstance(node, ast.ImportFrom)}
    assert not any(name.split(".")[0] in ("torch", "sklearn") for name in names)


def test_engines_never_import_each_other() -> None:
    names = {path.stem for path in (PACKAGE / "engines").glob("*.py")} - {"__init__"}
    for path in (PACKAGE / "engines").glob("*.py"):
        assert not {f"samestep.engines.{name}" for name in names} & _imports(path), path


def test_the_reference_imports_plain_values_only() -> None:
    allowed = {"samestep.engine", "samestep.errors", "samestep.job"}
    for path in (PACKAGE / "engines" / "reference").glob("*.py"):
        imported = {name for name in _imports(path) if name.startswith("samestep.")}
        others = {name for name in imported if not name.startswith("samestep.engines.reference")}
        assert {".".join(name.split(".")[:2]) for name in others} - {"samestep.engines"} <= allowed, path


def test_the_parent_never_imports_torch(tmp_path: Path) -> None:
    """A whole comparison, in a process where importing torch is an error."""
    script = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *_):\n"
        "        assert name.split('.')[0] not in ('torch', 'sklearn'), 'the parent imports ' + name\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from samestep.cli import main\n"
        f"sys.argv = ['samestep', 'compare', '--nproc', '1', '--engines', 'single', '--rounds', '1', "
        f"'--measured-steps', '5', '--deadline', '120', '--out', {str(tmp_path / 'out')!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").exists()
