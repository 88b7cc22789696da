"""Joins several modules into one text: what a job, an engine and the runtime need of each, in an order that runs.

Of the modules beside a user's job it decides which the script can hold, and which it must have beside it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from samestep.errors import UserError
from samestep.tasks.eject.source import Imports, Source, Statement, Use, is_ours, listed, origin


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


Place = tuple[str, str]  # a module and a name in it


class Joined:
    """The modules that a script holds, from `roots` on.

    roots: what the script's last line calls: the job, the engine's functions, and the start, which takes them all.
    own: the user's modules that the script holds, each of them whole.
    stands_for: what a script has in the place of some of samestep's names. dropped: leftovers of the user's.
    rewrite: (module, text) -> the text of one of samestep's modules, of which the script has what it needs.
    """

    def __init__(
        self,
        roots: list[Place],
        own: set[str],
        stands_for: Mapping[Place, Place],
        dropped: set[Place],
        rewrite: Callable[[str, str], str],
    ) -> None:
        self.roots, self.own, self.stands_for, self.dropped = roots, own, stands_for, dropped
        self.rewrite = rewrite
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
            is_inlined = module in self.own
            loaded = importlib.import_module(module)
            source = (
                Source(loaded, True, self._is_inlined) if is_inlined else Source(loaded, False, is_ours, self.rewrite)
            )
            self.sources[module], self.kept[module], self.before[module] = source, [], set()
            self.imports[module], self.aliases[module] = {}, {}
            if is_inlined:
                for line in source.imports.values():
                    if line.module not in ("typing", "__future__"):  # an import may have an effect of its own
                        self.imports[module][line.bound] = line
                for statement in source.statements:
                    if not any((module, name) in self.dropped for name in statement.binds):
                        self._keep(source, statement)
                for star in source.stars:
                    self.before[module].add(star)
                    self.source(star)
        return self.sources[module]

    def _is_inlined(self, module: str) -> bool:
        return module in self.own or is_ours(module)

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
        elif module == "samestep":  # it imports some of its names when they are asked for
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
            module, original = self._need(*source.links[name])
            self.before[source.name].add(module)
            if original != name:
                self.aliases[source.name][name] = original
        elif name in source.binders or name in source.imports:
            self._need(source.name, name)

    def _add_annotations(self) -> None:
        """Adds what annotations name, unless the script has that name already: they do nothing when it runs."""
        while self._annotations:
            module, name = self._annotations.pop(0)
            if name not in self.bound():
                self._use(self.sources[module], name)

    def bound(self) -> dict[str, list[str]]:
        """The script's names, and the sources that bind each."""
        modules_of: dict[str, list[str]] = {}
        for module, statements in self.kept.items():
            names = {name for statement in statements for name in statement.binds}
            names |= self.imports[module].keys() | self.aliases[module].keys()
            names = {name.partition(".")[0] for name in names}
            for name in sorted(names):
                modules_of.setdefault(name, []).append(module)
        return modules_of

    def clashes(self) -> dict[str, list[str]]:
        """Names that would be two things in one text, and the sources that bind them."""
        clashes = {}
        for name, modules in self.bound().items():
            absent = [module for module in self.kept if module not in modules] if hasattr(builtins, name) else []
            pythons = any(name in statement.uses for module in absent for statement in self.kept[module])
            if pythons or len({self._what(module, name) for module in modules}) > 1:
                clashes[name] = modules
        return clashes

    def _what(self, module: str, name: str) -> object:
        """What a name of a module is, to be compared."""
        source = self.sources[module]
        binders = [statement for statement in self.kept[module] if name in statement.binds]
        if name in self.aliases[module] or any(not statement.is_import for statement in binders):
            return module
        line = self.imports[module].get(name)
        try:
            if binders:
                return id(vars(source.module)[name])
            if line is None or line.plain:  # `import a.b` binds a
                return id(importlib.import_module(name))
            brought = importlib.import_module(line.module)
            return id(getattr(brought, line.name) if line.name else brought)
        except (ImportError, AttributeError):  # of a name that annotations alone need
            return line

    def leftovers(self, module: str, name: str) -> set[Place]:
        """What goes if a name of the user's goes that nothing uses, such as their old script's `train`: it, and the
        other unused definitions that use it. Nothing where it is used."""
        source = self.sources[module]
        unused = {
            statement: statement.binds - self._used(source)
            for statement in self.kept[module]
            if statement.is_plain_definition and not statement.binds & self._used(source)
        }
        gone = {name} & set().union(*unused.values())
        while more := {n for statement, names in unused.items() if statement.uses & gone for n in names} - gone:
            gone |= more
        return {(module, name) for name in gone} if source.whole else set()

    def _used(self, source: Source) -> set[str]:
        """The names of a source that the script needs, or that it reads when it starts."""
        names = {name for module, name in self.roots if module == source.name}
        names |= {
            name for other in self.sources.values() for module, name in other.links.values() if module == source.name
        }
        names |= {
            n for statement in self.kept[source.name] if not statement.is_plain_definition for n in statement.uses
        }
        while (
            more := {used for n in names for statement in source.binders.get(n, []) for used in statement.uses} - names
        ):
            names |= more
        return names

    def order(self) -> list[Source]:
        """The job's sources and the engine's, then what the start needs, then the start; but each after those that it
        needs when it is imported."""
        done: list[Source] = []
        met: set[str] = set()

        def add(module: str) -> None:
            if module not in met:  # also where the user's modules import one another
                met.add(module)
                first = self._first(module)
                for earlier in [earlier for earlier in self.sources if earlier in first]:
                    add(earlier)
                done.append(self.sources[module])

        start = self.roots[-1][0]
        runtime = start.rpartition(".")[0]
        first = ("samestep.jobs.", "samestep.engines.")
        basic = [name for name in self.sources if is_ours(name) and not name.startswith(first)]
        basic.sort(key=lambda name: not name.startswith(runtime))  # the runtime first
        for module in [*(name for name in self.sources if name not in basic), *basic]:
            if self.kept[module] and module != start:
                add(module)
        add(start)
        return [source for source in done if self.kept[source.name]]

    def _first(self, module: str) -> set[str]:
        """The sources that must stand before one."""
        source = self.sources[module]
        earlier = {neighbour for neighbour in self.before[module] if neighbour in self.own} if source.whole else set()
        names = {name for statement in self.kept[module] for name in statement.at_import} | {*self.aliases[module]}
        visited: set[Place] = set()
        waiting = [(module, name) for name in names]
        while waiting:
            place = waiting.pop()
            if place in visited:
                continue
            visited.add(place)
            holder, name = place
            source = self.sources[holder]
            if name in source.links:
                link = source.links[name]
                waiting.append(self.stands_for.get(link, link))
                if waiting[-1][0] in self.sources:
                    earlier.add(waiting[-1][0])
                else:
                    waiting.pop()
            for statement in source.binders.get(name, []):
                waiting += [(holder, used) for used in statement.uses]
        return earlier - {module}


def settled(
    roots: list[Place],
    job: ModuleType,
    near: Neighbours,
    stands_for: Mapping[Place, Place],
    rewrite: Callable[[str, str], str],
) -> Joined:
    """Returns the script's modules without clashes of names. near: what then stays in files beside the script.

    Of two things with one name, the user's leftover is dropped, and a module beside the job stays a file.
    Raises UserError that says what to rename in the job's file.
    """
    dropped = set[Place]()
    while True:
        joined = Joined(roots, near.own, stands_for, dropped, rewrite)
        clashes = joined.clashes()
        if not clashes:
            return joined
        places = [(module, name) for name, modules in clashes.items() for module in modules]
        if leftovers := set().union(*(joined.leftovers(*place) for place in places)):
            dropped |= leftovers
        elif movable := {module for module, _ in places if module in near.own and module != job.__name__}:
            near.leave(movable)
        elif any(module in near.own for module, _ in places):
            names = listed({name for module, name in places if module in near.own})
            raise UserError(f"the script has its own {names}; in the job's file, rename {names}")
        else:
            raise UserError(f"the script would define {listed({*clashes})} twice; rename it in the engine's file")
