"""Several modules as one flat text: what a job, an engine and the runtime need of each, in an order that runs."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from samestep.errors import UserError
from samestep.tasks.eject.imports import Imports
from samestep.tasks.eject.names import listed
from samestep.tasks.eject.source import Source, Statement, origin

Place = tuple[str, str]  # a module and a name in it


class Joined:
    """The modules that a script holds, from `roots` on.

    roots: what the script's last line calls: the job, the engine's functions, and the start, which takes them all.
    own: the user's modules, which are kept whole. beside: those of the user's that stay files of their own.
    stands_for: what a script has in the place of some of samestep's names. dropped: leftovers of the user's.
    """

    def __init__(
        self,
        roots: list[Place],
        own: set[str],
        beside: set[str],
        stands_for: Mapping[Place, Place],
        dropped: set[Place],
    ) -> None:
        self.roots, self.own, self.beside, self.stands_for = roots, own, beside, stands_for
        self.dropped = dropped
        self.sources: dict[str, Source] = {}
        self.kept: dict[str, list[Statement]] = {}
        self.imports: dict[str, Imports] = {}  # by the source that asks for them
        self.aliases: dict[str, dict[str, str]] = {}  # of a source: its own name for another's
        self.before: dict[str, set[str]] = {}  # the sources that one names
        self._annotations: list[Place] = []
        *first, start = roots
        self._need(*start)
        self.basic = [*self.sources]  # what the start needs, whatever the job and the engine are
        for root in first:
            self._need(*root)
        self._add_annotations()

    def source(self, module: str) -> Source:
        if module not in self.sources:
            whole = module in self.own
            found = Source(importlib.import_module(module), whole, self._is_inlined)
            self.sources[module], self.kept[module], self.before[module] = found, [], set()
            self.imports[module], self.aliases[module] = {}, {}
            if whole:
                for line in found.imports.values():
                    if line.module not in ("typing", "__future__"):  # an import may have an effect of its own
                        self.imports[module][line.bound] = line
                for statement in found.statements:
                    if not any((module, name) in self.dropped for name in statement.binds):
                        self._keep(found, statement)
                for star in found.stars:
                    self.before[module].add(star)
                    self.source(star)
        return self.sources[module]

    def _is_inlined(self, module: str) -> bool:
        ours = module.partition(".")[0] == "samestep"
        return (ours or module in self.own) and module not in self.beside

    def _need(self, module: str, name: str) -> Place:
        """Adds what defines a name of a module; where that is."""
        module, name = self.stands_for.get((module, name), (module, name))
        source = self.source(module)
        if name in source.links:
            return self._need(*source.links[name])
        if name in source.binders:
            for statement in source.binders[name]:
                self._keep(source, statement)
        elif name in source.imports:
            self.imports[module][name] = source.imports[name]
        elif hasattr(source.module, "__getattr__"):  # samestep's own: names that it imports when they are asked for
            return self._need(getattr(source.module, name).__module__, name)
        return module, name

    def _keep(self, source: Source, statement: Statement) -> None:
        if statement in self.kept[source.name]:
            return
        self.kept[source.name].append(statement)
        for name in sorted(statement.uses):
            self._use(source, name)
        self._annotations += [(source.name, name) for name in sorted(statement.mentions - statement.uses)]

    def _use(self, source: Source, name: str) -> None:
        if name in source.links:
            module, there = self._need(*source.links[name])
            self.before[source.name].add(module)
            if there != name:
                self.aliases[source.name][name] = there
        elif name in source.binders or name in source.imports:
            self._need(source.name, name)

    def _add_annotations(self) -> None:
        """What annotations name, as far as the script has nothing else of that name: nobody reads them when it runs."""
        while self._annotations:
            module, name = self._annotations.pop(0)
            if name not in self.bound():
                self._use(self.sources[module], name)

    def bound(self) -> dict[str, list[str]]:
        """The script's names, and the sources that bind each."""
        found: dict[str, list[str]] = {}
        for module, statements in self.kept.items():
            names = {name for statement in statements for name in statement.binds}
            names |= self.imports[module].keys() | self.aliases[module].keys()
            names = {name.partition(".")[0] for name in names}
            for name in sorted(names):
                found.setdefault(name, []).append(module)
        return found

    def clashes(self) -> dict[str, list[str]]:
        """Names that would be two things in one text, and the sources that bind them."""
        found = {}
        for name, modules in self.bound().items():
            if len({self._what(module, name) for module in modules}) > 1:
                found[name] = modules
            elif hasattr(builtins, name) and any(
                name in statement.uses and module not in modules
                for module, statements in self.kept.items()
                for statement in statements
            ):
                found[name] = modules
        return found

    def _what(self, module: str, name: str) -> object:
        """What a name of a module is, to be compared."""
        defined = any(name in statement.binds for statement in self.kept[module])
        if defined or name in self.aliases[module]:
            return module
        line = self.imports[module].get(name)
        if line is None or line.plain:  # `import a.b` binds a
            return name
        try:
            brought = importlib.import_module(line.module)
        except ImportError:  # of a name that annotations alone need
            return line.module, line.name
        return id(getattr(brought, line.name, line) if line.name else brought)

    def is_leftover(self, module: str, name: str) -> bool:
        """Whether a name is a definition of the user's that nothing uses, such as their old script's `main`."""
        source = self.sources[module]
        binders = source.binders.get(name, [])
        if not source.whole or (module, name) in self.roots or not binders:
            return False
        linked = any(link == (module, name) for each in self.sources.values() for link in each.links.values())
        used = any(name in each.uses for each in self.kept[module] if each not in binders)
        plain = all(hasattr(each.node, "decorator_list") and not each.node.decorator_list for each in binders)
        return plain and not linked and not used

    def order(self) -> list[Source]:
        """The job's sources and the engine's, then what the start needs, then the start; but each after those that it
        needs when it is imported."""
        done: list[Source] = []

        def add(module: str) -> None:
            if self.sources[module] in done:
                return
            for other in self.sources:
                if other != module and other in self._first(module):
                    add(other)
            if self.sources[module] not in done:
                done.append(self.sources[module])

        start = self.roots[-1][0]
        basic = sorted(self.basic, key=lambda name: not name.startswith(start.rpartition(".")[0]))  # the runtime first
        for module in [*(name for name in self.sources if name not in basic), *basic]:
            if self.kept[module] and module != start:
                add(module)
        add(start)
        return [source for source in done if self.kept[source.name]]

    def _first(self, module: str) -> set[str]:
        """The sources that must stand before one."""
        source = self.sources[module]
        found = {other for other in self.before[module] if other in self.own} if source.whole else set()
        names = {name for statement in self.kept[module] for name in statement.at_import} | {*self.aliases[module]}
        seen: set[Place] = set()
        waiting = [(module, name) for name in names]
        while waiting:
            place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            of, name = place
            source = self.sources[of]
            if name in source.links:
                link = source.links[name]
                waiting.append(self.stands_for.get(link, link))
                if waiting[-1][0] in self.sources:
                    found.add(waiting[-1][0])
                else:
                    waiting.pop()
            for statement in source.binders.get(name, []):
                waiting += [(of, used) for used in statement.uses]
        return found - {module}


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
            if module.partition(".")[0] == "samestep":
                if not inlinable or any(alias.name == "*" for alias in node.names):
                    raise _samesteps(source, node)
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


def _samesteps(source: Source, node: object) -> UserError:
    import ast

    text = ast.unparse(node) if isinstance(node, ast.AST) else ""
    return UserError(
        f"{source.path.name} has `{text}`, and a script has no samestep; write `from samestep import Job, …` at the "
        "file's top, each name by itself"
    )


def settled(roots: list[Place], job: ModuleType, stands_for: Mapping[Place, Place]) -> tuple[Joined, list[str]]:
    """The script's modules without clashes of names, and the files that it needs beside it.

    Of two things with one name, the user's leftover is dropped, and a module beside the job stays a file.
    Raises UserError that says what to rename in the job's file.
    """
    if job.__name__.partition(".")[0] == "samestep":
        own, beside, root = set[str](), set[str](), Path()
    else:
        own, beside, root = own_modules(job)
    dropped: set[Place] = set()
    while True:
        files = check_beside(beside, root)
        joined = Joined(roots, own, beside, stands_for, dropped)
        clashes = joined.clashes()
        if not clashes:
            return joined, files
        places = [(module, name) for name, modules in clashes.items() for module in modules]
        if leftovers := {place for place in places if joined.is_leftover(*place)}:
            dropped |= leftovers
        elif movable := {module for module, _ in places if module in own and module != job.__name__}:
            own, beside = own - movable, beside | movable
        elif any(module in own for module, _ in places):
            names = listed({name for module, name in places if module in own})
            raise UserError(f"the script has its own {names}; in the job's file, rename {names}")
        else:
            raise UserError(f"the script would define {listed({*clashes})} twice; rename it in the engine's file")
