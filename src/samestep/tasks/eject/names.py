"""Which names a statement at a module's top binds there, and which of the module's names it reads."""

from __future__ import annotations

import symtable
from collections.abc import Iterator

POSTPONED = "from __future__ import annotations\n"  # annotations are not read when a script runs


def bound(text: str) -> set[str]:
    """The names that a text binds at a module's top, by `global` in its functions too."""
    top, *inner = _scopes(text)
    found = {name.get_name() for name in top.get_symbols() if name.is_assigned() or name.is_imported()}
    within = (name for scope in inner for name in scope.get_symbols())
    found |= {name.get_name() for name in within if name.is_declared_global() and name.is_assigned()}
    return found - {"annotations"}  # which POSTPONED binds, and nobody reads


def used(text: str) -> set[str]:
    """The names that a text reads at a module's top, in any of its functions: the module's, and Python's."""
    top, *inner = _scopes(text)
    found = {name.get_name() for name in top.get_symbols() if name.is_referenced()}
    within = (name for scope in inner for name in scope.get_symbols())
    return found | {name.get_name() for name in within if name.is_global() and name.is_referenced()}


def listed(names: set[str]) -> str:
    return " and ".join(f"`{name}`" for name in sorted(names))


def _scopes(text: str) -> Iterator[symtable.SymbolTable]:
    waiting = [symtable.symtable(POSTPONED + text, "script", "exec")]
    while waiting:
        table = waiting.pop(0)
        yield table
        waiting += table.get_children()
