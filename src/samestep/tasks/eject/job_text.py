"""A job's file as a part of a script: without its imports of samestep, refused where it would not be the same job."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from samestep.errors import UserError
from samestep.tasks.eject.imports import Imports, imports_in
from samestep.tasks.eject.names import bound, listed, used

CLASSES = ("Job", "Batch", "Recipe", "LRSchedule")  # what a script has of samestep


class JobText:
    """The text of the job `called`, its function's name in `path`.

    imports: those at the file's head. names: all that it mentions. own: other names that it gives samestep's classes.
    """

    def __init__(self, path: Path, called: str) -> None:
        with tokenize.open(path) as file:
            self.source = file.read()
        self.called = called
        self.tree = ast.parse(self.source)
        self._check_imports()
        top = self.tree.body
        self.head = top[: next((n for n, node in enumerate(top) if not (_imports(node) or _text(node))), len(top))]
        self.imports: Imports = imports_in(self.head)
        self.own = {
            alias.asname or alias.name: alias.name
            for node in top
            if _from_samestep(node)
            for alias in node.names  # type: ignore[attr-defined]
        }
        self.kept = [n for n in top if n not in self.head and not _from_samestep(n) and not _is_main(n)]

    def without(self, taken: Callable[[set[str]], set[str]]) -> None:
        """Leaves out functions that nothing else here uses, where their names are taken: `main`, as a rule.

        taken: which of these names the rest of the script has for itself. Raises UserError for those that must stay.
        """
        while names := taken(self.bound()):
            free = [
                node
                for node in self.kept
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
                and not node.decorator_list
                and node.name in names - {self.called}
                and not any(node.name in used(other) for other in self.kept if other is not node)
            ]
            if not free:
                raise UserError(f"the script has its own {listed(names)}; in the job's file, rename {listed(names)}")
            self.kept = [node for node in self.kept if node not in free]

    def bound(self) -> set[str]:
        """The names that this part of the script binds."""
        own = {other for other, name in self.own.items() if other != name}
        imports = [node for node in self.head if _imports(node) and not _from_samestep(node)]
        return own.union(*map(bound, [*imports, *self.kept]))

    def text(self) -> str:
        """The part of the script."""
        lines, dropped, mixed = self.source.split("\n"), set(), {}
        for together in self._by_lines():
            first, last = _first_line(together[0], lines, self.kept), together[-1].end_lineno or 0
            kept = [node for node in together if node in self.kept]
            if len(kept) < len(together):
                dropped |= set(range(first, last + 1))
                mixed[first] = [ast.get_source_segment(self.source, node) or "" for node in kept]
        out = [f"{other} = {name}" for other, name in self.own.items() if other != name]
        for number, line in enumerate(lines, 1):
            out += mixed.get(number, []) + ([] if number in dropped else [line])
        return "\n".join(out).strip() + "\n"

    def mentions(self) -> set[str]:
        """Every name, attribute, keyword and text in it."""
        found = set(self.own.values())
        for node in self._nodes():
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    found.add(name)
                case ast.Constant(value=str(name)):
                    found.add(name)
        return found

    def fills_by_place(self) -> bool:
        """Whether a Job may get values that no keyword in the text names: by their place, or from a dict."""
        jobs = {other for other, name in self.own.items() if name == "Job"}
        jobs |= {node.name for node in self.kept if isinstance(node, ast.ClassDef)} | {"replace"}
        for node in self._nodes():
            if isinstance(node, ast.Call):
                names = {getattr(n, "id", getattr(n, "attr", None)) for n in (node.func, *node.args[:1])}
                spread = any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args)
                if names & jobs and (spread or len(node.args) > 5):
                    return True
        return False

    def _nodes(self) -> Iterator[ast.AST]:
        for statement in self.kept:
            yield from ast.walk(statement)

    def _by_lines(self) -> list[list[ast.stmt]]:
        """The statements at the top, those that share a line together."""
        groups: list[list[ast.stmt]] = []
        for node in self.tree.body:
            if groups and node.lineno == groups[-1][-1].end_lineno:
                groups[-1].append(node)
            else:
                groups.append([node])
        return groups

    def _check_imports(self) -> None:
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            text = f"the job's file has `{ast.unparse(node)}`"
            if isinstance(node, ast.ImportFrom) and node.level:
                raise UserError(
                    f"{text}, which a script outside its package cannot; import by the package's whole name"
                )
            ours = [name for name in _modules(node) if name.partition(".")[0] == "samestep"]
            names = {alias.name for alias in node.names}
            if ours and not (_from_samestep(node) and node in self.tree.body and names <= set(CLASSES)):
                few = (
                    "write `from samestep import Job, …` at the file's top, of Job, Batch, Recipe and LRSchedule alone"
                )
                raise UserError(f"{text}, and a script has no samestep; {few}")
            if "*" in names:
                raise UserError(f"{text}, which does not tell what it brings; name what the job needs of it")


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


def _imports(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _from_samestep(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module in ("samestep", "samestep.job")


def _is_main(node: ast.stmt) -> bool:
    """Whether this runs where the file is started itself, which is then the script's own to say."""
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
        return False
    main = {ast.unparse(side) for side in (node.test.left, *node.test.comparators)} == {"__name__", "'__main__'"}
    if main and node.orelse:
        raise UserError('the job\'s file has an else at `if __name__ == "__main__"`, which a script cannot keep')
    return main and isinstance(node.test.ops[0], ast.Eq)


def _first_line(node: ast.stmt, lines: list[str], kept: list[ast.stmt]) -> int:
    """Where a statement starts; with the comment right above it, where a definition or a block is left out."""
    first = node.lineno
    if node not in kept and isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If):
        while first > 1 and lines[first - 2].startswith("#"):
            first -= 1
    return first
