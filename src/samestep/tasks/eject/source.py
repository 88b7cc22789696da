"""Splits a module's text into statements: what each binds and uses, and which of its imports a script holds itself."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import symtable
import tokenize
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from samestep.tasks.eject.import_lines import Import, Imports

DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SET_APART = (*DEFINITION, ast.If)


@dataclass(frozen=True, eq=False)
class Statement:
    """A statement at a module's top. text: its lines, with the comment right above it. line: where it begins. within:
    the names that it imports from samestep in its functions."""

    node: ast.stmt
    text: str
    line: int
    within: frozenset[str]

    @property
    def is_apart(self) -> bool:
        """Whether blank lines set it apart."""
        return isinstance(self.node, SET_APART)

    @cached_property
    def binds(self) -> frozenset[str]:
        """The names that it binds at the module's top."""
        if isinstance(self.node, DEFINITION):
            return frozenset((self.node.name,))
        top = self._scopes[0]
        return frozenset(name.get_name() for name in top.get_symbols() if name.is_assigned())

    @cached_property
    def uses(self) -> frozenset[str]:
        """The names that it reads at the module's top, in any of its functions: the module's, and Python's. Annotations
        count for nothing."""
        top, *inner = self._scopes
        uses = {name.get_name() for name in top.get_symbols() if name.is_referenced()}
        for scope in inner:
            uses |= {name.get_name() for name in scope.get_symbols() if name.is_global() and name.is_referenced()}
        return frozenset(uses) | self.within

    @cached_property
    def mentions(self) -> frozenset[str]:
        """The names that its annotations mention alone."""
        names: set[str] = set()
        for inner in ast.walk(self.node):
            for field in ("annotation", "returns"):
                annotation = getattr(inner, field, None)
                if isinstance(annotation, ast.AST):
                    names |= {name.id for name in ast.walk(annotation) if isinstance(name, ast.Name)}
        return frozenset(names - self.uses)

    @cached_property
    def _scopes(self) -> list[symtable.SymbolTable]:
        """The scopes of the statement, the module's first."""
        text = ast.unparse(_Plain().visit(deepcopy(self.node)))
        scopes = [symtable.symtable(text, "script", "exec")]
        for scope in scopes:
            scopes += scope.get_children()
        return scopes


class Source:
    """The text of a module of samestep's, or of an engine of another package.

    links: names that come from samestep's modules -> (module, name). imports: those that come from others.
    """

    def __init__(self, module: str) -> None:
        loaded = importlib.import_module(module)
        self.module, self.name = loaded, module
        path = Path(str(loaded.__file__))
        with tokenize.open(path) as file:
            text = file.read()
        self._lines = text.split("\n")
        self._package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse(text)
        self.about = (ast.get_docstring(tree) or "").partition("\n\n")[0]
        self.links: dict[str, tuple[str, str]] = {}
        self.imports: Imports = {}
        self.statements: list[Statement] = []
        for node in tree.body:
            if imports := imports_of(node):
                for imported in imports:
                    self._import(imported)
            else:
                self.statements.append(self._statement(node))
        self.binders: dict[str, list[Statement]] = {}
        for statement in self.statements:
            for name in statement.binds:
                self.binders.setdefault(name, []).append(statement)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                line = Import(alias.name, "", alias.asname or alias.name)
                self.imports[line.bound] = line
            return
        module = importlib.util.resolve_name("." * node.level + (node.module or ""), self._package)
        for alias in node.names:
            local = alias.asname or alias.name
            if is_ours(module):
                self.links[local] = module, alias.name
            else:
                self.imports[local] = Import(module, alias.name, local)

    def _statement(self, node: ast.stmt) -> Statement:
        """Returns a statement, without its functions' imports of samestep: a script has those names at its top."""
        inner = [found for found in ast.walk(node) if isinstance(found, ast.ImportFrom) and is_ours(found.module or "")]
        gone: set[int] = set()
        for found in inner:
            self._import(found)
            gone |= set(range(found.lineno, (found.end_lineno or found.lineno) + 1))
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        while first > 1 and self._lines[first - 2].startswith("#"):
            first -= 1
        numbers = range(first, (node.end_lineno or node.lineno) + 1)
        lines = [self._lines[number - 1] for number in numbers if number not in gone]
        within = frozenset(alias.asname or alias.name for found in inner for alias in found.names)
        return Statement(node, "\n".join(lines), first, within)

    def text(self, kept: Collection[Statement]) -> str:
        """Returns the lines of these statements, in their order."""
        text = ""
        before: Statement | None = None
        for statement in sorted(kept, key=lambda statement: statement.line):
            is_apart = before is not None and (before.is_apart or statement.is_apart)
            text += ("\n\n\n" if is_apart else "\n" if before else "") + statement.text
            before = statement
        return text


def is_ours(module: str) -> bool:
    """Whether a module is samestep's."""
    return module.partition(".")[0] == "samestep"


def imports_of(node: ast.stmt) -> list[ast.Import | ast.ImportFrom]:
    """Returns the imports that a statement is: itself, or those that only the type checker finds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [node]
    if (
        isinstance(node, ast.If)
        and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        and not node.orelse
    ):
        return [statement for statement in node.body if isinstance(statement, ast.Import | ast.ImportFrom)]
    return []


class _Plain(ast.NodeTransformer):
    """Removes annotations, which a script does not need."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        self.generic_visit(node)
        return ast.Pass() if node.value is None else ast.Assign([node.target], node.value, lineno=node.lineno)
