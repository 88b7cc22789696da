"""Changes of a user's source text: of expressions and statements, at their places, with all else as it stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from samestep.judge.source import DEPTH, RANKS, STATISTICS, Source, header_of


@dataclass(frozen=True)
class Edit:
    """Puts a text in place of the bytes from start to end. Of several at one place the first comes first."""

    start: int
    end: int
    text: str


class Draft:
    """A source text to which changes are made. Edits overlap nowhere: result() is None where they do."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._text = source.text.encode()
        self._edits: list[Edit] = []
        self._starts = [0]
        for line in self._text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def result(self) -> str | None:
        """Returns the changed text; None where nothing is changed, or what comes out is no Python."""
        edits = sorted(self._edits, key=lambda edit: edit.start)
        if not edits or any(after.start < before.end for before, after in pairwise(edits)):
            return None
        text = self._text
        for edit in reversed(edits):
            text = text[: edit.start] + edit.text.encode() + text[edit.end :]
        try:
            changed = text.decode()
            ast.parse(changed)
        except (SyntaxError, ValueError):
            return None
        return changed if changed != self.source.text else None

    def code(self, node: ast.AST) -> str:
        """Returns the text of an expression or a statement."""
        start, end = self._span(node)
        return self._text[start:end].decode()

    def replace(self, node: ast.AST, text: str) -> None:
        self._edits.append(Edit(*self._span(node), text))

    def insert_before(self, statement: ast.stmt, *lines: str) -> None:
        """Inserts lines before a statement, indented as it is."""
        start = self._starts[statement.lineno - 1]
        self._edits.append(Edit(start, start, self._indented(statement, lines)))

    def insert_after(self, statement: ast.stmt, *lines: str) -> None:
        """Inserts lines after a statement, indented as it is."""
        start = self._starts[statement.end_lineno or statement.lineno]
        newline = "" if self._text[:start].endswith(b"\n") else "\n"
        self._edits.append(Edit(start, start, newline + self._indented(statement, lines)))

    def insert_first(self, block: ast.stmt, *lines: str) -> None:
        """Inserts lines as the first ones inside of a loop, a function or a condition, where that begins on its own
        line."""
        body: list[ast.stmt] = getattr(block, "body", [])
        if body and body[0].lineno > block.lineno:
            self.insert_before(body[0], *lines)

    def remove(self, statement: ast.stmt) -> None:
        """Removes the lines of a statement."""
        self._edits.append(Edit(self._starts[statement.lineno - 1], self._starts[statement.end_lineno or 0], ""))

    def indent(self, statement: ast.stmt, under: str) -> None:
        """Puts a statement under a line, as `if rank == 0:`."""
        lines = self.source.lines[statement.lineno - 1 : statement.end_lineno]
        margin = " " * statement.col_offset
        start, end = self._starts[statement.lineno - 1], self._starts[statement.end_lineno or 0]
        text = "".join(f"    {line}\n" if line.strip() else f"{line}\n" for line in lines)
        self._edits.append(Edit(start, end, f"{margin}{under}\n{text}"))

    def unwrap(self, block: ast.If | ast.For) -> None:
        """Replaces a condition or a loop by its body."""
        first, last = block.body[0], block.body[-1]
        if first.lineno == block.lineno or block.orelse:
            return
        lines = self.source.lines[first.lineno - 1 : last.end_lineno]
        indent = first.col_offset - block.col_offset
        text = "".join(f"{line[indent:] if line[:indent].isspace() else line}\n" for line in lines)
        self._edits.append(Edit(self._starts[block.lineno - 1], self._starts[last.end_lineno or 0], text))

    def is_alone(self, statement: ast.stmt) -> bool:
        """Returns whether a statement has its lines for itself, and is not the only one of its block."""
        text = "\n".join(self.source.lines[statement.lineno - 1 : statement.end_lineno])
        return text.strip() == self.code(statement).strip() and len(self.source.block(statement)) > 1

    def without_ranks(self, statement: ast.stmt) -> bool:
        """Removes the number of ranks from a product or a quotient of a statement, where it stands in exactly one."""
        parts: Iterable[ast.AST] = ast.walk(header_of(statement))
        factors = [node for node in parts if isinstance(node, ast.BinOp) and self._other_factor(node) is not None]
        if len(factors) != 1:
            return False
        remaining = self._other_factor(factors[0])
        assert remaining is not None
        if (
            isinstance(statement, ast.Assign)
            and statement.value is factors[0]
            and self.code(statement.targets[0]) == self.code(remaining)  # the statement that is left would be x = x
        ):
            self.remove(statement)
            return True
        start, end = self._span(factors[0])
        before, after = self._text[start - 2 : start].decode(errors="replace"), self._text[end : end + 1]
        # A name needs no brackets, unless they are those of a call.
        if (
            isinstance(remaining, ast.Name)
            and before[-1:] == "("
            and after == b")"
            and not re.match(r"[\w)\]]", before)
        ):
            start, end = start - 1, end + 1
        self._edits.append(Edit(start, end, self.code(remaining)))
        return True

    def _other_factor(self, node: ast.BinOp) -> ast.expr | None:
        if isinstance(node.op, ast.Mult | ast.Div) and is_ranks(node.right):
            return node.left
        return node.right if isinstance(node.op, ast.Mult) and is_ranks(node.left) else None

    def _indented(self, statement: ast.stmt, lines: Iterable[str]) -> str:
        # The margin as it is written: tabs, too.
        margin = re.match(r"\s*", self.source.code(statement.lineno))
        return "".join(f"{margin[0] if margin else ''}{line}\n" for line in lines)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def is_ranks(node: ast.AST) -> bool:
    """Returns whether an expression is the number of ranks: a name, an attribute, or a call that asks for it."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] == "get_world_size"
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return bool(RANKS.fullmatch(name))


def call_in(statement: ast.AST | None, name: str, line: int = 0) -> ast.Call | None:
    """Returns the call of a function or a method of this name in a statement, where there is exactly one."""
    calls = []
    for node in ast.walk(statement) if statement else ():
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != name:
            continue
        if not line or node.lineno <= line <= (node.end_lineno or 0):
            calls.append(node)
    return calls[0] if len(calls) == 1 else None


def is_of_gradients(tensor: ast.expr, statement: ast.stmt, source: Source, depth: int = DEPTH) -> bool:
    """Returns whether a tensor of a statement is a gradient, or made of gradients by assignments and by loops over
    them; a number that gradients are reduced to, as their norm, is none."""
    nodes = [*ast.walk(tensor)]
    called = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
    if called & STATISTICS or depth < 0:
        return False
    if any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in nodes):
        return True
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    functions = (node for node in source.around(statement.lineno) if isinstance(node, ast.FunctionDef))
    made: list[tuple[list[ast.expr], ast.expr]] = []
    for node in ast.walk(next(functions, source.tree)):
        if isinstance(node, ast.Assign):
            made.append((node.targets, node.value))
        elif isinstance(node, ast.For):
            made.append(([node.target], node.iter))
    return any(
        is_of_gradients(value, statement, source, depth - 1)
        for targets, value in made
        if names & {name for target in targets for name in _set_in(target)}
    )


def _set_in(target: ast.expr) -> set[str]:
    """Returns the names that a target sets; an attribute sets none."""
    names = (node for node in ast.walk(target) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def argument_of(call: ast.Call, name: str, place: int) -> ast.expr | None:
    """Returns an argument of a call, which is given by its name or at a place."""
    named = keyword(call, name)
    return named.value if named else call.args[place] if len(call.args) > place else None


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    """Returns a keyword argument of a call."""
    return next((argument for argument in call.keywords if argument.arg == name), None)
