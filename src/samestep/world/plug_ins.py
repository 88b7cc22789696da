"""Plug-ins of one kind: modules of a package of samestep's own, and what other packages register as entry points."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Generic, TypeVar

from samestep.errors import UserError
from samestep.message import message
from samestep.world.foreign_code import as_exceptions

Declared = TypeVar("Declared")


@dataclass(frozen=True)
class PlugIns(Generic[Declared]):
    """Finds plug-ins of one kind by their names, and imports them. Each search takes milliseconds, and is done once."""

    package: str
    """The package whose modules are samestep's own plug-ins, such as 'samestep.engines'."""

    group: str
    """The entry-point group in which other packages register theirs."""

    constant: str
    """The name of what a module declares, such as 'ENGINE'."""

    kind: type[Declared]
    """The class of what a module declares."""

    @cached_property
    def own(self) -> frozenset[str]:
        """The names of samestep's own plug-ins, none of which is imported."""
        spec = find_spec(self.package)
        assert spec
        return frozenset(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))

    @cached_property
    def of_other_packages(self) -> dict[str, EntryPoint]:
        """Name -> the entry point of another package, the first where several have one name; without `shadowed`."""
        return {point.name: point for point in reversed(self._points) if point.name not in self.own}

    @property
    def shadowed(self) -> list[EntryPoint]:
        """The entry points of other packages that have the name of one of samestep's own."""
        return [point for point in self._points if point.name in self.own]

    @cached_property
    def _points(self) -> list[EntryPoint]:
        """All entry points of the group."""
        return [*entry_points(group=self.group)]

    def load(self, name: str) -> Declared:
        """Imports a plug-in that there is. Raises UserError where another package's declares nothing of this kind, and
        what its import raises, as an Exception."""
        if name in self.own:
            declared: Declared = getattr(importlib.import_module(f"{self.package}.{name}"), self.constant)
            return declared
        with as_exceptions():
            loaded = self.of_other_packages[name].load()
            found = getattr(loaded, self.constant, loaded)
        if isinstance(found, self.kind):
            return found
        kind = {"type": self.kind.__name__, "module": self.kind.__module__}
        raise UserError(message("plug_in_declares_none", constant=self.constant, **kind))
