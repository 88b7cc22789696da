"""Finds the names that a statement at a module's top binds, and the module's names that it reads."""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from copy import deepcopy


class _Plain(ast.NodeTransformer):
    """Removes annotations, which a script does not need."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        self.generic_visit(node)
        return ast.Pass() if node.value is None else ast.Assign([node.target], node.value, lineno=node.lineno)


def bound_and_used(statement: ast.stmt) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a statement binds at a module's top, by `global` in its functions too; and those that it reads
    there, in any of its functions: the module's, and Python's. Annotations count for nothing."""
    top, *inner = _scopes(ast.unparse(_Plain().visit(deepcopy(statement))))
    binds = {name.get_name() for name in top.get_symbols() if name.is_assigned() or name.is_imported()}
    uses = {name.get_name() for name in top.get_symbols() if name.is_referenced()}
    for name in (name for scope in inner for name in scope.get_symbols()):
        binds |= {name.get_name()} if name.is_declared_global() and name.is_assigned() else set()
        uses |= {name.get_name()} if name.is_global() and name.is_referenced() else set()
    return frozenset(binds), frozenset(uses)


def listed(names: set[str]) -> str:
    return " and ".join(f"`{name}`" for name in sorted(names))


def _scopes(text: str) -> Iterator[symtable.SymbolTable]:
    waiting = [symtable.symtable(text, "script", "exec")]
    while waiting:
        table = waiting.pop(0)
        yield table
        waiting += table.get_children()
