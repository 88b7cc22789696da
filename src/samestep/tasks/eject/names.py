"""Which names a text binds and uses at its top: what a script would lack, and what it would bind twice."""

from __future__ import annotations

import ast
import builtins
import symtable
import textwrap
from collections import Counter
from collections.abc import Iterator

from samestep.errors import UserError

POSTPONED = "from __future__ import annotations\n"  # annotations are not read when a script runs


def mentioned(text: str) -> set[str]:
    """Every name in a text, of any scope."""
    return {node.id for node in ast.walk(ast.parse(textwrap.dedent(text))) if isinstance(node, ast.Name)}


def bound(text: str | ast.AST) -> set[str]:
    """The names that a module, or a statement at its top, binds there."""
    top, *inner = _scopes(text if isinstance(text, str) else ast.unparse(text))
    found = {name.get_name() for name in top.get_symbols() if name.is_assigned() or name.is_imported()}
    within = (name for scope in inner for name in scope.get_symbols())
    found |= {name.get_name() for name in within if name.is_declared_global() and name.is_assigned()}
    return found - {"annotations"}  # which POSTPONED binds, and nobody reads


def used(text: str | ast.AST) -> set[str]:
    """The names that a module reads at its top, in any of its functions: its own, and Python's."""
    top, *inner = _scopes(text if isinstance(text, str) else ast.unparse(text))
    found = {name.get_name() for name in top.get_symbols() if name.is_referenced()}
    within = (name for scope in inner for name in scope.get_symbols())
    return found | {name.get_name() for name in within if name.is_global() and name.is_referenced()}


def lacking(text: str) -> set[str]:
    """The names that a module uses and nothing in it binds."""
    names = used(text) - bound(text) - {*dir(builtins), "annotations"}
    return {name for name in names if not (name.startswith("__") and name.endswith("__"))}


def check(script: str, job: str, what: str) -> None:
    """Raises UserError for a script that could not run: one that does not compile, or lacks a name that `job`, the
    text of the job's file, does not lack itself."""
    try:
        compile(script, what, "exec")
    except SyntaxError as error:
        said = (error.text or "").strip()
        raise UserError(f"the script of {what} would not compile: {error.msg} in `{said}`") from None
    if lost := lacking(script) - lacking(job):
        raise UserError(f"the script of {what} would use {listed(lost)}, which nothing in it defines")


def check_once(frame: str, what: str) -> None:
    """Raises UserError where what surrounds the job in a script binds a name twice."""
    count = Counter(name for node in ast.parse(frame).body for name in bound(node))
    if twice := {name for name, times in count.items() if times > 1}:
        raise UserError(f"the script of {what} would define {listed(twice)} twice; rename it in the engine's file")


def listed(names: set[str]) -> str:
    return " and ".join(f"`{name}`" for name in sorted(names))


def _scopes(text: str) -> Iterator[symtable.SymbolTable]:
    waiting = [symtable.symtable(POSTPONED + textwrap.dedent(text), "script", "exec")]
    while waiting:
        table = waiting.pop(0)
        yield table
        waiting += table.get_children()
