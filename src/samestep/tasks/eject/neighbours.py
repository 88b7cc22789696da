"""The modules that lie beside a user's job: which of them a script can hold, and which it must have beside it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

from samestep.errors import UserError
from samestep.tasks.eject.source import Source, origin


def own_modules(job: ModuleType) -> tuple[set[str], set[str], Path]:
    """(the user's modules that a script can hold, those that stay files of their own, the folder of both).

    These are the job's module and those beside it that it imports. One stays a file where it is used as a module
    (`import model`), or imported inside of a function. Raises UserError for one that must stay and needs samestep.
    """
    file = Path(str(job.__file__)).resolve()
    root = file.parents[job.__name__.count(".") + (file.name == "__init__.py")]
    found: dict[str, Source] = {}
    beside: set[str] = set()
    waiting = [job.__name__]
    while waiting:
        name = waiting.pop(0)
        if name in found:
            continue
        source = found[name] = Source(importlib.import_module(name), True, lambda _: False)
        for node, module, inlinable in source.modules_used():
            names, said = {alias.name for alias in node.names}, f"{source.path.name} has `{ast.unparse(node)}`"
            if module.partition(".")[0] == "samestep":
                if not inlinable or "*" in names:
                    raise UserError(
                        f"{said}, and a script has no samestep; write `from samestep import Job, …` at the file's top, "
                        "each name by itself"
                    )
            elif "*" in names and not _is_beside(module, root):
                raise UserError(f"{said}, which does not tell what it brings; name what the job needs of it")
            elif _is_beside(module, root) and module != name:
                waiting.append(module)
                beside |= set() if inlinable else {module}
    while more := {m for name in beside for _, m, _ in found[name].modules_used() if m in found} - beside:
        beside |= more
    return found.keys() - beside, beside, root


def check_beside(beside: set[str], root: Path) -> list[str]:
    """The files that a script needs beside it. Raises UserError for one that needs samestep."""
    files = []
    for name in sorted(beside):
        source = Source(importlib.import_module(name), True, lambda _: False)
        file = str(source.path.resolve().relative_to(root))
        if any(module.partition(".")[0] == "samestep" for _, module, _ in source.modules_used()):
            raise UserError(
                f"{file} imports samestep, and the script would have to import {file}; in the job's file, write "
                f"`from {name} import …` at its top, with names that it has not itself"
            )
        files.append(file)
    return files


def _is_beside(module: str, root: Path) -> bool:
    file = origin(module)
    return file is not None and file.is_relative_to(root) and "site-packages" not in file.parts
