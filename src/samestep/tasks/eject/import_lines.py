"""The import lines of a script, as ruff sorts them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple


class Import(NamedTuple):
    """One name that an import binds. name '' for a plain `import module`, with or without `as`."""

    module: str
    name: str
    bound: str

    @property
    def is_plain(self) -> bool:
        return not self.name and self.bound == self.module


# By the name that each binds; a plain one by its module: `import a.b` and `import a` both stay.
Imports = dict[str, Import]


def block(imports: Imports) -> str:
    """Returns the import lines."""
    sections: list[list[str]] = [[], [], []]
    for module in sorted({line.module for line in imports.values()}, key=str.lower):
        section = 0 if module == "__future__" else 1 if module.partition(".")[0] in sys.stdlib_module_names else 2
        sections[section] += _lines([line for line in imports.values() if line.module == module])
    ordered = ["\n".join(sorted(lines, key=lambda line: line.startswith("from"))) for lines in sections if lines]
    return "\n\n".join(ordered)


def _lines(imports: list[Import]) -> Iterator[str]:
    module = imports[0].module
    for line in sorted((line for line in imports if not line.name), key=lambda line: (not line.is_plain, line.bound)):
        yield f"import {module}" + ("" if line.is_plain else f" as {line.bound}")
    named = sorted((line for line in imports if line.name), key=lambda line: _by_type(line.name))
    if unaliased := [line.name for line in named if line.bound == line.name]:
        text = f"from {module} import {', '.join(unaliased)}"
        wrapped = "\n".join([f"from {module} import (", *(f"    {imported}," for imported in unaliased), ")"])
        yield text if len(text) <= 120 else wrapped
    yield from (f"from {module} import {line.name} as {line.bound}" for line in named if line.bound != line.name)


def _by_type(name: str) -> tuple[int, str, str]:
    """Constants, then classes, then functions, as ruff orders them."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2, name.lower(), name)
