"""Splits a module's text into statements: what each binds and uses, and which of its imports a script holds itself."""

from __future__ import annotations

import ast
import importlib.util
import symtable
import sys
import tokenize
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from samestep.errors import UserError

DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Statement:
    """A statement at a module's top.

    first, last: its lines, with the comment right above a definition. uses: names that it reads, in functions too;
    at_import: those that it reads when the module is imported; mentions: those that its annotations mention.
    """

    node: ast.stmt
    first: int
    last: int
    binds: frozenset[str]
    uses: frozenset[str]
    at_import: frozenset[str]
    mentions: frozenset[str]

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, ast.Import | ast.ImportFrom)

    @property
    def is_plain_definition(self) -> bool:
        """Whether nothing happens where it stands, but that it is defined."""
        return isinstance(self.node, DEFINITION) and not self.node.decorator_list


class Use(NamedTuple):
    """An import of a module. by_name: of names in it, not of the module. at_top: not in a function or a block."""

    node: ast.Import | ast.ImportFrom
    module: str
    by_name: bool
    at_top: bool


class Source:
    """The text of `module`.

    whole: of a file that the user wrote: all of it is kept. Of others, what is used.
    is_inlined: whether the script holds the module of this name itself. rewrite: changes a module's text.
    links: names that come from such modules -> (module, name). imports: those that come from others.
    """

    def __init__(
        self,
        module: ModuleType,
        whole: bool,
        is_inlined: Callable[[str], bool],
        rewrite: Callable[[str, str], str] | None = None,
    ) -> None:
        self.module, self.name, self.whole, self._is_inlined = module, module.__name__, whole, is_inlined
        self.path = Path(str(module.__file__))
        with tokenize.open(self.path) as file:
            self.text = file.read()
        if rewrite:
            self.text = rewrite(self.name, self.text)
        self.lines = self.text.split("\n")
        self.tree = ast.parse(self.text)
        self.package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        self.docstring = ast.get_docstring(self.tree)
        self.links: dict[str, tuple[str, str]] = {}
        self.imports: Imports = {}
        self.stars: list[str] = []  # modules all of whose names are here
        self.statements: list[Statement] = []
        self._read()

    def _read(self) -> None:
        head = True
        for number, node in enumerate(self.tree.body):
            if number == 0 and self.docstring is not None:
                continue
            if imports := _imports_of(node):
                for imported in imports:
                    if head or not self.whole or imported is not node or self._must_go(imported):
                        self._import(imported)
                    else:
                        self.statements.append(self._statement(node))
            elif not _is_main(node):
                head = False
                self.statements.append(self._statement(node))
        self.binders: dict[str, list[Statement]] = {}
        for statement in self.statements:
            for name in statement.binds:
                self.binders.setdefault(name, []).append(statement)

    def _must_go(self, node: ast.Import | ast.ImportFrom) -> bool:
        """Whether an import cannot stand in the script as it is."""
        return isinstance(node, ast.ImportFrom) and (node.level > 0 or self._is_inlined(self.absolute(node)))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                line = Import(alias.name, "", alias.asname or alias.name)
                self.imports[line.bound] = line
            return
        module = self.absolute(node)
        for alias in node.names:
            local = alias.asname or alias.name
            if not self._is_inlined(module):
                self.imports[local] = Import(module, alias.name, local)
            elif alias.name == "*":
                self.stars.append(module)
            else:
                self.links[local] = module, alias.name

    def _statement(self, node: ast.stmt) -> Statement:
        lines, (binds, uses) = self._lines(node), bound_and_used(node)
        return Statement(
            node,
            min(lines),
            max(lines),
            binds=binds,
            uses=uses,
            at_import=frozenset(_at_import(node) & uses),
            mentions=frozenset(_mentions(node)),
        )

    def _lines(self, node: ast.stmt) -> set[int]:
        """The lines of a statement; of a definition, with its decorators and the comment right above."""
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        while isinstance(node, DEFINITION) and first > 1 and self.lines[first - 2].startswith("#"):
            first -= 1
        return set(range(first, (node.end_lineno or node.lineno) + 1))

    def absolute(self, node: ast.ImportFrom) -> str:
        """The module that an import names, a relative one too."""
        if not node.level:
            return node.module or ""
        if not self.package:
            raise UserError(f"{self.path.name} has `{ast.unparse(node)}`, and is in no package; leave out the dots")
        return importlib.util.resolve_name("." * node.level + (node.module or ""), self.package)

    def uses_of_modules(self) -> Iterator[Use]:
        """Each module that is imported anywhere in the file."""
        top = {id(statement) for node in self.tree.body for statement in _imports_of(node)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (Use(node, alias.name, False, id(node) in top) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = self.absolute(node)
                inside = [f"{module}.{alias.name}" for alias in node.names if _is_module(module, alias.name)]
                yield Use(node, module, not inside, id(node) in top)
                yield from (Use(node, name, False, id(node) in top) for name in inside)

    def kept(self, statements: Collection[Statement]) -> str:
        """The text with these statements alone: its own lines."""
        lines = {line for statement in statements for line in range(statement.first, statement.last + 1)}
        gone: set[int] = set()
        keep = {id(statement.node) for statement in statements}
        for node in self.tree.body:
            if id(node) not in keep:
                gone |= self._lines(node)
                first = min(self._lines(node))
                while not self.whole and first > 1 and self.lines[first - 2].startswith("#"):
                    first -= 1
                    gone.add(first)
        out: list[str] = []
        for number, line in enumerate(self.lines, 1):
            if number in lines & gone:
                line = "; ".join(self._parts(number, statements))
            elif number in gone:
                continue
            if line.strip() or out[-2:] != ["", ""]:
                out.append(line)
        return "\n".join(out).strip("\n")

    def _parts(self, number: int, statements: Collection[Statement]) -> Iterator[str]:
        """Those of several statements on one line that are kept."""
        for statement in sorted(statements, key=lambda statement: statement.node.col_offset):
            if statement.first <= number <= statement.last:
                if statement.first != statement.last:
                    raise UserError(f"{self.path.name}: line {number} holds several statements; give each its own")
                yield ast.get_source_segment(self.text, statement.node) or ""


def is_ours(module: str) -> bool:
    """Whether a module is samestep's."""
    return module.partition(".")[0] == "samestep"


def origin(module: str) -> Path | None:
    """The file of a module that is imported or could be."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin).resolve() if spec and spec.origin and spec.origin.endswith(".py") else None


def _is_module(package: str, name: str) -> bool:
    return origin(package) is not None and origin(f"{package}.{name}") is not None


def _imports_of(node: ast.stmt) -> list[ast.Import | ast.ImportFrom]:
    """The imports that a statement is: itself, or those that only the type checker sees."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [node]
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        inner = [statement for statement in node.body if isinstance(statement, ast.Import | ast.ImportFrom)]
        return inner if len(inner) == len(node.body) and not node.orelse else []
    return []


def _is_main(node: ast.stmt) -> bool:
    """Whether this runs where the file is started itself, which is then the script's own to say."""
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
        return False
    main = {ast.unparse(side) for side in (node.test.left, *node.test.comparators)} == {"__name__", "'__main__'"}
    if main and node.orelse:
        raise UserError('the job\'s file has an else at `if __name__ == "__main__"`, which a script cannot keep')
    return main and isinstance(node.test.ops[0], ast.Eq)


def _at_import(node: ast.AST) -> set[str]:
    """The names that a statement reads when it runs, not when what it defines is called."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [*node.args.defaults, *(child for child in node.args.kw_defaults if child)]
        return set().union(*map(_names, [*node.decorator_list, *defaults]))
    if isinstance(node, ast.ClassDef):
        around = [*node.decorator_list, *node.bases, *(child.value for child in node.keywords)]
        return set().union(*map(_names, around), *map(_at_import, node.body))
    return _names(node)


def _mentions(node: ast.AST) -> set[str]:
    """The names in annotations."""
    names: set[str] = set()
    for inner in ast.walk(node):
        for field in ("annotation", "returns"):
            annotation = getattr(inner, field, None)
            if isinstance(annotation, ast.AST):
                names |= _names(annotation)
    return names


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


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


class Import(NamedTuple):
    """One name that an import binds. name '' for a plain `import module`, with or without `as`."""

    module: str
    name: str
    bound: str

    @property
    def plain(self) -> bool:
        return not self.name and self.bound == self.module


Imports = dict[
    str, Import
]  # by the name that each binds; a plain one by its module: `import a.b` and `import a` both stay


def block(imports: Imports) -> str:
    """The import lines, as ruff sorts them."""
    sections: list[list[str]] = [[], [], []]
    for module in sorted({line.module for line in imports.values()}, key=str.lower):
        section = 0 if module == "__future__" else 1 if module.partition(".")[0] in sys.stdlib_module_names else 2
        sections[section] += _lines([line for line in imports.values() if line.module == module])
    ordered = ["\n".join(sorted(lines, key=lambda line: line.startswith("from"))) for lines in sections if lines]
    return "\n\n".join(ordered)


def _lines(imports: list[Import]) -> Iterator[str]:
    module = imports[0].module
    for line in sorted((line for line in imports if not line.name), key=lambda line: (not line.plain, line.bound)):
        yield f"import {module}" + ("" if line.plain else f" as {line.bound}")
    named = sorted((line for line in imports if line.name), key=lambda line: _by_type(line.name))
    if unaliased := [line.name for line in named if line.bound == line.name]:
        text = f"from {module} import {', '.join(unaliased)}"
        wrapped = "\n".join([f"from {module} import (", *(f"    {imported}," for imported in unaliased), ")"])
        yield text if len(text) <= 120 else wrapped
    yield from (f"from {module} import {line.name} as {line.bound}" for line in named if line.bound != line.name)


def _by_type(name: str) -> tuple[int, str, str]:
    """Constants, then classes, then functions, as ruff orders them."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2, name.lower(), name)
