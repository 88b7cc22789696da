"""What benchmarks, the museum and scripts import of samestep exists: most of them are run by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import samestep

ROOT = Path(__file__).parents[2]
SOURCE = Path(samestep.__file__).parents[1]


def test_each_imported_name_exists() -> None:
    files = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "museum").glob("*.py"), ROOT / "scripts/readme-table"]
    missing = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module or not node.module.startswith("samestep."):
                continue
            names = set(_names_of(node.module))
            for alias in node.names:
                if alias.name not in names and not _file_of(f"{node.module}.{alias.name}").exists():
                    missing.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}")
    assert missing == []


def _names_of(module: str) -> Iterator[str]:
    """Yields the names that a module defines or imports, without importing it."""
    file = _file_of(module)
    for node in ast.walk(ast.parse(file.read_text())) if file.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)


def _file_of(module: str) -> Path:
    path = SOURCE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
