"""Joins what a script needs of several modules, by whole statements, into two texts: the script's and its runtime's."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType

from samestep.errors import UserError
from samestep.message import message
from samestep.tasks.eject.import_lines import Import, Imports
from samestep.tasks.eject.source import Source, Statement, is_ours

Place = tuple[str, str]  # a module and a name in it
# What starts commands, and looks at them.
OF_COMMANDS = tuple(f"samestep.{room}" for room in ("commands", "launch", "proof", "recorder", "report", "testing"))


class Joined:
    """The statements that are needed from `roots` on.

    stand_ins: name of samestep's -> the module of runtime/ that has what a script has in its place. in_script: the
    modules whose statements stand in the script; the others' stand in the runtime module.
    """

    def __init__(self, roots: Iterable[Place], stand_ins: Mapping[str, str], in_script: Collection[str]) -> None:
        self.stand_ins, self.in_script = stand_ins, in_script
        self.sources: dict[str, Source] = {}
        self.kept: dict[str, list[Statement]] = {}
        self.imports: dict[str, Imports] = {}  # by the module that asks for them
        self.linked: dict[str, dict[str, Place]] = {}  # of a module: its names that stand in others
        for place in roots:
            self._need(*place)
        self._add_annotations()

    def _source(self, module: str) -> Source:
        if module not in self.sources:
            self.sources[module], self.kept[module] = Source(module), []
            self.imports[module], self.linked[module] = {}, {}
        return self.sources[module]

    def _need(self, module: str, name: str) -> Place:
        """Adds what defines a name of a module. Returns where that is."""
        module = self.stand_ins.get(name, module) if is_ours(module) else module
        if module.startswith(OF_COMMANDS):
            raise UserError(message("script_has_no_command", name=name))
        source = self._source(module)
        if name in source.links:
            return self._need(*source.links[name])
        for statement in source.binders.get(name, []):
            self._keep(source, statement)
        if name in source.imports:
            self.imports[module][name] = source.imports[name]
        elif name not in source.binders:
            value = getattr(source.module, name, None)  # `samestep` imports some of its names when they are asked for
            if isinstance(value, ModuleType) or not is_ours(getattr(value, "__module__", None) or ""):
                raise UserError(message("script_has_no_module", name=name, module=module))
            if value.__module__ == module:
                raise UserError(message("script_lacks_name", name=name, module=module))
            return self._need(value.__module__, name)
        return module, name

    def _keep(self, source: Source, statement: Statement) -> None:
        if statement in self.kept[source.name]:
            return
        self.kept[source.name].append(statement)
        for name in sorted(statement.uses):
            self._use(source, name)

    def _use(self, source: Source, name: str) -> None:
        if name in source.links:
            self.linked[source.name][name] = self._need(*source.links[name])
        elif name in source.binders or name in source.imports:
            self._need(source.name, name)

    def _add_annotations(self) -> None:
        """Adds what annotations mention: they do nothing when the script runs, and name what is there."""
        done: set[Place] = set()
        while True:
            mentioned: set[Place] = set()
            for module, statements in self.kept.items():
                mentioned |= {(module, name) for statement in statements for name in statement.mentions}
            if mentioned <= done:
                return
            for module, name in sorted(mentioned - done):
                self._use(self.sources[module], name)
            done |= mentioned

    def order(self, *, in_script: bool) -> list[str]:
        """Returns the modules of one of the two texts, each after those of which it has names."""
        done: list[str] = []
        met: set[str] = set()

        def add(module: str) -> None:
            if module not in met:
                met.add(module)
                for holder, _ in self.linked[module].values():
                    add(holder)
                done.append(module)

        for module in self.sources:
            add(module)
        return [module for module in done if self.kept[module] and (module in self.in_script) is in_script]

    def check(self, modules: Iterable[str]) -> None:
        """Raises UserError for a name that two of these modules, in one text, give to different things."""
        meant: dict[str, object] = {}
        for module in modules:
            names: dict[str, object] = {
                name: (module, name) for statement in self.kept[module] for name in statement.binds
            }
            names |= {name: line for name, line in self.imports[module].items()}
            names |= {local: place for local, place in self.linked[module].items()}
            for name, what in names.items():
                if meant.setdefault(name, what) != what:
                    raise _twice(name)

    def check_free(self, name: str, modules: Iterable[str]) -> None:
        """Raises UserError for a name that one of these modules defines."""
        if any(name in statement.binds for module in modules for statement in self.kept[module]):
            raise _twice(name)

    def text(self, module: str) -> str:
        """Returns what is needed of a module, under a line that names its file."""
        about = "\n".join(textwrap.wrap(self.sources[module].about, 118, initial_indent="# ", subsequent_indent="# "))
        file = module.replace(".", "/")
        lines = [f"# {f' {file}.py ':-^118}"]
        lines += [about] if about else []
        aliases = []
        for local, (holder, name) in self.linked[module].items():
            if local != name and holder not in self.in_script and module not in self.in_script:
                aliases.append(f"{local} = {name}")
        body = "\n\n\n".join([*(["\n".join(aliases)] if aliases else []), self.sources[module].text(self.kept[module])])
        is_apart = re.match("def |class |@|if ", body)
        return "\n".join(lines) + ("\n\n\n" if is_apart else "\n\n") + body

    def outside(self, modules: Iterable[str]) -> Imports:
        """Returns the imports of these modules from outside of samestep."""
        imports: Imports = {}
        for module in modules:
            imports |= self.imports[module]
        return imports

    def from_runtime(self, modules: Iterable[str], runtime: str) -> Imports:
        """Returns the imports of these modules, which stand in the script, from the runtime module."""
        imports: Imports = {}
        for module in modules:
            for local, (holder, name) in self.linked[module].items():
                if holder not in self.in_script:
                    imports[local] = Import(runtime, name, local)
        return imports


def _twice(name: str) -> UserError:
    return UserError(message("script_would_define_name_twice", name=name))
