"""The modules that lie beside a user's job: which of them a script can hold, and which it must have beside it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

from samestep.errors import UserError
from samestep.tasks.eject.source import Source, Use, is_ours, origin


class Neighbours:
    """The job's module and those beside it that it imports, and that these import.

    beside: those that stay files of their own, because they are used as modules (`import model`), imported inside a
    function, or look for files beside themselves (`__file__`); with all that they import. own: the others, which the
    script can hold. None of both for a job of samestep's.
    """

    def __init__(self, job: ModuleType) -> None:
        self.own: set[str] = set()
        self.beside: set[str] = set()
        self._sources: dict[str, Source] = {}
        self._root = Path()
        if job.__name__.partition(".")[0] == "samestep":
            return
        file = Path(str(job.__file__)).resolve()
        self._root = file.parents[job.__name__.count(".") + (file.name == "__init__.py")]
        waiting, must_stay = [job.__name__], set[str]()
        while waiting:
            name = waiting.pop(0)
            if name not in self._sources:
                self._sources[name] = Source(importlib.import_module(name), True, lambda _: False)
                for use in self._near(name):
                    waiting.append(use.module)
                    must_stay |= set() if use.by_name and use.at_top else {use.module}
        must_stay |= {name for name in self._sources if name != job.__name__ and self._looks_beside_itself(name)}
        self.own = {*self._sources}
        self.leave(must_stay)

    def leave(self, modules: set[str]) -> None:
        """Leaves modules beside the script, with all that they import. Raises UserError where one needs samestep, and
        for imports of the others that a script cannot have."""
        while modules:
            self.own, self.beside = self.own - modules, self.beside | modules
            modules = {use.module for name in self.beside for use in self._near(name)} - self.beside
        for name in sorted(self.beside):
            if any(is_ours(use.module) for use in self._sources[name].uses_of_modules()):
                file = self._sources[name].path.name
                raise UserError(
                    f"{file} imports samestep, and the script would have to import {file}; in the job's file, write "
                    f"`from {name} import …` at its top, with names that it has not itself"
                )
        for name in sorted(self.own):
            for use in self._sources[name].uses_of_modules():
                self._check(self._sources[name], use)

    def files(self) -> list[str]:
        """The files that the script needs beside it."""
        paths = [self._sources[name].path.resolve().relative_to(self._root) for name in self.beside]
        return sorted(map(str, paths))

    def _looks_beside_itself(self, name: str) -> bool:
        """Whether a module that could stay a file uses `__file__`, which in the script is the script's."""
        source = self._sources[name]
        named = any(isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(source.tree))
        return named and not any(is_ours(use.module) for use in source.uses_of_modules())

    def _near(self, name: str) -> list[Use]:
        """What a module imports of those beside the job."""
        uses = []
        for use in self._sources[name].uses_of_modules():
            file = None if is_ours(use.module) or use.module == name else origin(use.module)
            if file and file.is_relative_to(self._root) and "site-packages" not in file.parts:
                uses.append(use)
        return uses

    def _check(self, source: Source, use: Use) -> None:
        says = f"{source.path.name} has `{ast.unparse(use.node)}`"
        star = any(alias.name == "*" for alias in use.node.names)
        if is_ours(use.module) and (star or not (use.by_name and use.at_top)):
            raise UserError(
                f"{says}, and a script has no samestep; write `from samestep import Job, …` at the file's top, "
                "each name by itself"
            )
        if star and use.module not in self._sources:
            raise UserError(f"{says}, which does not say what it imports; import the names that the job needs")
        if getattr(use.node, "level", 0) and not use.at_top:
            raise UserError(f"{says}, and a script is in no package; write it at the file's top")
