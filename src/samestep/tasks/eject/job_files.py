"""The job's file and the modules beside it that it imports, which a script needs as they are."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import tokenize
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from samestep.errors import UserError
from samestep.message import message
from samestep.tasks.eject.source import is_ours


class Use(NamedTuple):
    """An import of a name in a module, or of the module itself: name ''."""

    node: ast.Import | ast.ImportFrom
    module: str
    name: str


class JobFiles:
    """The files of a job, and what they import of samestep.

    name: the job's module, as a script imports it. is_built_in: it is one of samestep's. root: the folder that Python
    imports it from. files: module -> its file. uses: what they import of samestep: module and name.
    """

    def __init__(self, job: ModuleType) -> None:
        self.is_built_in = is_ours(job.__name__)
        self.name = job.__name__.rpartition(".")[2] if self.is_built_in else job.__name__
        # Not resolved: a link beside the job is imported by the name of the link.
        file = Path(os.path.abspath(str(job.__file__)))
        levels = self.name.count(".") + (file.name == "__init__.py")
        self.root = file.parents[min(levels, len(file.parents) - 1)]
        place = self.root.joinpath(*self.name.split("."))
        if file not in (place.with_suffix(".py"), place / "__init__.py"):
            raise UserError(message("job_file_name_cannot_be_imported", file=file.name))
        self.is_installed = bool({"site-packages", "dist-packages"} & {*self.root.parts})
        self.files: dict[str, Path] = {}
        self.uses: set[tuple[str, str]] = set()
        waiting = [(self.name, file), *self._beside(self.name.rpartition(".")[0])]
        while waiting:
            name, file = waiting.pop()
            if name not in self.files:
                self.files[name] = file
                for use in _uses(file, name):
                    if is_ours(use.module):
                        self._take(file, use)
                    elif not self.is_built_in:
                        # What is imported from a module may be a module, too.
                        waiting += self._beside(f"{use.module}.{use.name}")

    def _take(self, file: Path, use: Use) -> None:
        """Notes what a file imports of samestep. Raises UserError for what a script cannot have in its place."""
        if use.name in ("", "*"):
            raise UserError(message("job_file_imports_samestep_whole", file=file.name, statement=ast.unparse(use.node)))
        self.uses.add((use.module, use.name))

    def _beside(self, module: str) -> Iterator[tuple[str, Path]]:
        """Yields a module and the packages that hold it, where they are beside the job. Nothing is imported for it."""
        first, *_ = names = module.strip(".").split(".")
        if (
            not first
            or first in sys.stdlib_module_names
            or (self.is_installed and first != self.name.partition(".")[0])
        ):
            return
        for name in accumulate(names, "{}.{}".format):
            path = self.root.joinpath(*name.split("."))
            if (path / "__init__.py").is_file():
                yield name, path / "__init__.py"
            elif path.with_suffix(".py").is_file():
                yield name, path.with_suffix(".py")
            elif not path.is_dir():  # a folder without __init__.py may hold modules, too
                return

    def relative(self) -> dict[str, Path]:
        """Returns the files, by the path that each has beside a script; none of an installed package's."""
        if self.is_installed and not self.is_built_in:
            return {}
        return {str(file.relative_to(self.root)): file for file in self.files.values()}


def _uses(file: Path, name: str) -> Iterator[Use]:
    """Yields each name and each module that a file imports, in functions too."""
    try:
        with tokenize.open(file) as opened:
            tree = ast.parse(opened.read())
    except SyntaxError as error:
        raise UserError(message("imported_file_is_no_python", file=file, error=error.msg, line=error.lineno)) from None
    for statement in tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            statement.body = []  # a script imports the file
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Use(node, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:  # of an import that is never made
                continue
            yield from (Use(node, module, alias.name) for alias in node.names)


def origin(module: str) -> Path | None:
    """Returns the file of a module that is imported or could be."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin).resolve() if spec and spec.origin and spec.origin.endswith(".py") else None
