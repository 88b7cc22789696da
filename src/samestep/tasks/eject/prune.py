"""Leaves out of a module's text what a script never reaches: pure functions of the text and of what is known.

An edit is a piece of the text and what takes its place. Edits are made, and the text parsed again, until there are
none: an `if` whose test is known becomes its branch, then the branch is looked at. Comments and line breaks stay.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Unknown:
    """The value of an expression of which nothing is known."""


class Present:
    """The value of an expression of which it is known that it is true, and not None."""


UNKNOWN, PRESENT = Unknown(), Present()
COMPARISONS: Mapping[type[ast.cmpop], Any] = {
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
    ast.Gt: lambda left, right: left > right,
    ast.GtE: lambda left, right: left >= right,
    ast.Lt: lambda left, right: left < right,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
FUNCTIONS: Mapping[str, Any] = {"bool": bool, "len": len, "max": max, "min": min}
SIMPLE = (bool, int, float, str, type(None))
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)  # the statements after which a block goes no further
BINDS_LOOSELY = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr)
CONDITION_BEGINS = ("if (", "and (", "or (", "not (", "while (", "return (")
YIELDS = (ast.Yield, ast.YieldFrom)
# The start of a script has opened the process group, and its ranks have whole sequences.
TRANSPARENT = ("nullcontext()", "process_group(world)", "ExitStack() as entered")


class Edit(NamedTuple):
    """A piece of the text, in bytes, and what takes its place."""

    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Known:
    """What is known of the code of one module.

    values: expression -> its value, PRESENT for some that is true. parameters: function -> those of its keyword-only
    parameters whose values are known, as text. members: class -> its fields and methods that nothing uses. defaults:
    function of a library -> its parameters' defaults. unused: assignments that are left out, by their text or by
    that of their value. texts: expressions -> what is written in their place; $ stands for the argument of a call.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    members: Mapping[str, Collection[str]] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unused: Collection[str] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


def pruned(text: str, known: Known) -> str:
    """Returns the text of a module without what is never reached."""
    while True:
        data = text.encode()
        found = _Edits(text, known).of(ast.parse(text))
        edits = outermost(edit for edit in found if data[edit.begin : edit.end] != edit.text.encode())
        if not edits:
            return text
        for edit in reversed(edits):
            data = data[: edit.begin] + edit.text.encode() + data[edit.end :]
        text = data.decode()


def outermost(edits: Iterable[Edit]) -> list[Edit]:
    """Returns the edits that lie within no other, in their order."""
    left: list[Edit] = []
    for edit in sorted(edits, key=lambda edit: (edit.begin, -edit.end)):
        if not left or edit.begin >= left[-1].end:
            left.append(edit)
    return left


def value_of(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """Returns the value of an expression, PRESENT for one that is true, UNKNOWN where nothing is known."""
    if not isinstance(node, ast.Constant) and (text := ast.unparse(node)) in values:
        return values[text]
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Tuple(elts=elements):
            inner = [value_of(element, values) for element in elements]
            return UNKNOWN if _any_unknown(inner) else tuple(inner)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = value_of(operand, values)
            return UNKNOWN if value is UNKNOWN else not value
        case ast.BoolOp(op=operator, values=operands):
            return _joined(operator, operands, [value_of(operand, values) for operand in operands])
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return _compared(value_of(left, values), operator, value_of(right, values))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            inner = [value_of(argument, values) for argument in arguments]
            if name == "bool" and inner == [PRESENT]:
                return True
            try:
                return UNKNOWN if _any_unknown(inner) or PRESENT in inner else FUNCTIONS[name](*inner)
            except (TypeError, ValueError):  # of a branch that is not reached
                return UNKNOWN
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            inner = [value_of(left, values), value_of(right, values)]
            return inner[0] - inner[1] if all(type(value) is int for value in inner) else UNKNOWN
    return UNKNOWN


def _joined(operator: ast.boolop, operands: list[ast.expr], inner: list[Any]) -> Any:
    """Returns the value of operands joined by `and` or `or`."""
    decides = isinstance(operator, ast.Or)
    number = next((n for n, value in enumerate(inner) if value is not UNKNOWN and bool(value) is decides), None)
    if number is None:
        return UNKNOWN if _any_unknown(inner) else inner[-1]
    # An `and` is false whatever stands before; an `or` is True where nothing else that is true can come before.
    if not decides or not _any_unknown(inner[:number]):
        return inner[number]
    return inner[number] if inner[number] is True and all(map(_is_bool, operands[:number])) else UNKNOWN


def _is_bool(node: ast.expr) -> bool:
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _any_unknown(values: list[Any]) -> bool:
    return any(value is UNKNOWN for value in values)


def _compared(left: Any, operator: ast.cmpop, right: Any) -> Any:
    if left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN
    if isinstance(operator, ast.Is | ast.IsNot):
        same = left is None if right is None else UNKNOWN
        return same if same is UNKNOWN or isinstance(operator, ast.Is) else not same
    if PRESENT in (left, right) or type(operator) not in COMPARISONS:
        return UNKNOWN
    return COMPARISONS[type(operator)](left, right)


class _Edits:
    """Finds the edits of one text."""

    def __init__(self, text: str, known: Known) -> None:
        self.known, self.data = known, text.encode()
        self.lines = self.data.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.values: dict[str, Any] = dict(known.values)

    def of(self, node: ast.AST) -> Iterator[Edit]:
        """Yields the edits in a node."""
        if isinstance(node, ast.FunctionDef) and (parameters := self.known.parameters.get(node.name)):
            yield from self._function(node, parameters)
            return
        if isinstance(node, ast.ClassDef):
            yield from self._members(node)
        if isinstance(node, ast.expr) and (edit := self._expression(node)):
            yield edit
            return
        if isinstance(node, ast.Call):
            yield from self._arguments(node)
        for _, child in ast.iter_fields(node):
            if isinstance(child, list) and child and isinstance(child[0], ast.stmt):
                yield from self._statements(node, child)
            else:
                for inner in child if isinstance(child, list) else [child]:
                    if isinstance(inner, ast.AST):
                        yield from self.of(inner)

    def _statements(self, parent: ast.AST, statements: list[ast.stmt]) -> Iterator[Edit]:
        ends = next((number for number, node in enumerate(statements) if isinstance(node, ENDS)), len(statements))
        # A function that yields nothing any more would be another function.
        never = [node for node in statements[ends + 1 :] if not any(isinstance(n, YIELDS) for n in ast.walk(node))]
        gone = [statement for statement in statements if statement in never or self._is_gone(statement)]
        for statement in statements:
            if statement in gone:
                first, last = self._line_range(statement)
                alone = gone == statements and statement is statements[-1] and not isinstance(parent, ast.Module)
                yield self._lines(first, last, [b" " * statement.col_offset + b"pass\n"] if alone else [])
            elif isinstance(statement, ast.If) and value_of(statement.test, self.values) is not UNKNOWN:
                yield self._branch(statement, taken=bool(value_of(statement.test, self.values)))
            elif isinstance(statement, ast.With) and self._is_transparent(statement):
                yield self._lines(statement.lineno, self._end(statement), self._dedented(statement, statement.body))
            else:
                yield from self.of(statement)

    def _is_gone(self, statement: ast.stmt) -> bool:
        if isinstance(statement, ast.Assign):
            return bool({ast.unparse(statement), ast.unparse(statement.value)} & {*self.known.unused})
        if isinstance(statement, ast.Assert):
            return value_of(statement.test, self.values) is not UNKNOWN
        if isinstance(statement, ast.If) and not statement.orelse and not self._is_elif(statement):
            value = value_of(statement.test, self.values)
            return value is not UNKNOWN and not value
        return False

    def _is_transparent(self, statement: ast.With) -> bool:
        return all(ast.unparse(item) in TRANSPARENT for item in statement.items)

    def _is_elif(self, statement: ast.If) -> bool:
        return self.lines[statement.lineno - 1][statement.col_offset :].startswith(b"elif")

    def _branch(self, node: ast.If, *, taken: bool) -> Edit:
        """Puts the branch that is taken in the place of the `if` or `elif`."""
        indent, is_elif = b" " * node.col_offset, self._is_elif(node)
        if taken and is_elif:
            body = self.lines[self._head_end(node) : self._end_of(node.body)]
            return self._lines(node.lineno, self._end(node), [indent + b"else:\n", *body])
        if taken:
            return self._lines(node.lineno, self._end(node), self._dedented(node, node.body))
        other_is_elif = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) and self._is_elif(node.orelse[0])
        begin = node.orelse[0].lineno if other_is_elif else self._else_line(node)
        if is_elif:
            return self._lines(node.lineno, begin - 1 if node.orelse else self._end(node), [])
        if other_is_elif:
            branch = self.lines[begin - 1 : self._end(node)]
            return self._lines(node.lineno, self._end(node), [branch[0].replace(b"elif", b"if", 1), *branch[1:]])
        return self._lines(node.lineno, self._end(node), self._unindented(self.lines[begin : self._end(node)]))

    def _else_line(self, node: ast.If) -> int:
        """Returns the number of the line `else:`."""
        number = self._end_of(node.body) + 1
        while node.orelse and self.lines[number - 1].strip() != b"else:":
            number += 1
        return number

    def _dedented(self, node: ast.If | ast.With, body: list[ast.stmt]) -> list[bytes]:
        return self._unindented(self.lines[self._head_end(node) : self._end_of(body)])

    @staticmethod
    def _unindented(lines: list[bytes]) -> list[bytes]:
        return [line.removeprefix(b"    ") for line in lines]

    def _head_end(self, node: ast.If | ast.With) -> int:
        """Returns the number of the last line of a statement's head."""
        inner = node.test if isinstance(node, ast.If) else node.items[-1].context_expr
        return inner.end_lineno or inner.lineno

    @staticmethod
    def _end(node: ast.stmt) -> int:
        return node.end_lineno or node.lineno

    def _end_of(self, body: list[ast.stmt]) -> int:
        return self._end(body[-1])

    def _line_range(self, node: ast.stmt) -> tuple[int, int]:
        """Returns the first and the last line of a statement, with its decorators."""
        return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]), self._end(node)

    def _lines(self, first: int, last: int, instead: list[bytes]) -> Edit:
        return Edit(self.starts[first - 1], self.starts[last], b"".join(instead).decode())

    def _function(self, node: ast.FunctionDef, parameters: Mapping[str, str]) -> Iterator[Edit]:
        """Leaves out parameters, and puts their values in their place."""
        outer = self.values
        constants = {name: ast.parse(text, mode="eval").body for name, text in parameters.items()}
        simple = {name: value.value for name, value in constants.items() if isinstance(value, ast.Constant)}
        self.values = {**outer, **dict.fromkeys(constants, PRESENT), **simple}
        if any(argument.arg in parameters for argument in node.args.kwonlyargs):
            yield self._signature(node, parameters)
        for statement in node.body:
            for name in (n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id in parameters):
                if name.id not in simple:
                    yield self._text(name, parameters[name.id])
        yield from self._statements(node, node.body)
        yield from self._inlined(node)
        self.values = outer

    def _inlined(self, node: ast.FunctionDef) -> Iterator[Edit]:
        """Puts the body of an inner function in the place of its one call: `loss = backward(batch)`."""
        for inner in (statement for statement in node.body if isinstance(statement, ast.FunctionDef)):
            last, parameters = inner.body[-1], ", ".join(argument.arg for argument in inner.args.args)
            uses = [name for name in ast.walk(node) if isinstance(name, ast.Name) and name.id == inner.name]
            for call in (found for found in ast.walk(node) if isinstance(found, ast.Assign)):
                target, text = ast.unparse(call.targets[0]), f"{inner.name}({parameters})"
                is_last = isinstance(last, ast.Return) and last.value and ast.unparse(last.value) == target
                if is_last and len(uses) == 1 and ast.unparse(call.value) == text:
                    indent = b" " * (call.col_offset - inner.body[0].col_offset)
                    spaces = -min(0, call.col_offset - inner.body[0].col_offset)
                    body = self.lines[inner.body[0].lineno - 1 : last.lineno - 1]
                    yield self._lines(call.lineno, self._end(call), [indent + line[spaces:] for line in body])
                    before = inner.lineno - 1
                    while not self.lines[before - 1].strip():
                        before -= 1
                    after = inner.end_lineno or inner.lineno
                    while not self.lines[after].strip():
                        after += 1
                    yield self._lines(before + 1, after, [])

    def _signature(self, node: ast.FunctionDef, parameters: Mapping[str, str]) -> Edit:
        given = node.args
        rendered = [ast.unparse(argument) for argument in given.args]
        for argument, default in zip(given.args[::-1], given.defaults[::-1]):
            rendered[given.args.index(argument)] += f" = {_source(default)}"
        left = [pair for pair in zip(given.kwonlyargs, given.kw_defaults) if pair[0].arg not in parameters]
        rendered += ["*"] if left else []
        rendered += [ast.unparse(argument) + (f" = {_source(d)}" if d else "") for argument, d in left]
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        line = f"def {node.name}({', '.join(rendered)}){returns}:\n"
        if len(line) > 121:
            line = f"def {node.name}(\n    {', '.join(rendered)}\n){returns}:\n"
        return self._lines(node.lineno, node.body[0].lineno - 1, [line.encode()])

    def _members(self, node: ast.ClassDef) -> Iterator[Edit]:
        """Leaves out a class's fields and methods that nothing uses, with the lines before them."""
        unused = {*self.known.members.get(node.name, ()), "__new__"} if node.name in self.known.members else set()
        before = node.body[0].lineno - 1
        for statement in node.body:
            name = getattr(statement, "name", None)
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
            if name in unused:
                yield self._lines(before + 1, self._end(statement), [])
            before = self._end(statement)
        doc = ast.get_docstring(node, clean=False)
        if unused and doc and "\n\n" in doc:
            yield self._text(node.body[0], f'"""{_first_paragraph(doc)}"""')

    def _expression(self, node: ast.expr) -> Edit | None:
        if isinstance(node, ast.IfExp) and (value := value_of(node.test, self.values)) is not UNKNOWN:
            return self._text(node, self._segment(node.body if value else node.orelse))
        if isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(node, ast.Constant | ast.Tuple):
            return None
        if isinstance(node, ast.Call):
            arguments = ", ".join(map(ast.unparse, node.args))
            if text := self.known.texts.get(ast.unparse(node.func) + "($)"):
                return self._text(node, text.replace("$", arguments))
        if text := self.known.texts.get(ast.unparse(node)):
            return self._text(node, text)
        value = value_of(node, self.values)
        if type(value) in SIMPLE:
            return self._text(node, _source(ast.Constant(value)))
        if isinstance(node, ast.BoolOp):
            left = [operand for number, operand in enumerate(node.values) if not self._is_idle(node, number)]
            if len(left) < len(node.values):
                word = " and " if isinstance(node.op, ast.And) else " or "
                edit = self._text(node, word.join(map(self._operand, left)))
                return (
                    self._without_parentheses(edit)
                    if len(left) == 1 and not isinstance(left[0], BINDS_LOOSELY)
                    else edit
                )
        return None

    def _operand(self, node: ast.expr) -> str:
        # Its place is without its parentheses.
        return f"({self._segment(node)})" if isinstance(node, BINDS_LOOSELY) else self._segment(node)

    def _without_parentheses(self, edit: Edit) -> Edit:
        """Returns an edit that takes the parentheses around its place along, where they are of a condition."""
        before, after = self.data[: edit.begin].decode(), self.data[edit.end :].decode()
        if not before.endswith(CONDITION_BEGINS) or not after.startswith((")\n", "):", ") ")):
            return edit
        return Edit(edit.begin - 1, edit.end + 1, edit.text)

    def _is_idle(self, node: ast.BoolOp, number: int) -> bool:
        """Whether an operand changes nothing: one that is true of an `and`, one that is false of an `or`."""
        value = value_of(node.values[number], self.values)
        if value is UNKNOWN or bool(value) is isinstance(node.op, ast.Or):
            return False
        return number < len(node.values) - 1 or value is (not isinstance(node.op, ast.Or))

    def _arguments(self, node: ast.Call) -> Iterator[Edit]:
        """Leaves out arguments: `*()`, and the values of fields and parameters that are left out."""
        gone: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred) and value_of(argument.value, self.values) == ():
                gone.append(argument)
        gone += [keyword for keyword in node.keywords if self._is_left_out(node, keyword)]
        arguments: list[Any] = [*node.args, *node.keywords]
        if gone and (line := self._on_one_line(node, [argument for argument in arguments if argument not in gone])):
            yield self._text(node, line)
            return
        for argument in gone:
            number = arguments.index(argument)
            begin, end = self._place(argument)
            before = self.lines[argument.lineno - 1][: argument.col_offset]
            if node.lineno != argument.lineno and not before.strip():
                yield self._lines(argument.lineno, argument.end_lineno, [])
            elif number + 1 < len(arguments):
                yield Edit(begin, self._place(arguments[number + 1])[0], "")
            else:
                yield Edit(self._place(arguments[number - 1])[1] if number else begin, end, "")

    def _on_one_line(self, node: ast.Call, arguments: list[Any]) -> str:
        """Returns a call with these arguments, where it was on several lines and now fits on one; else ''."""
        segments = [self._segment(part) for part in (node.func, *arguments)]
        line = f"{segments[0]}({', '.join(segments[1:])})"
        is_plain = "#" not in self._segment(node) and "\n" not in line and node.lineno != node.end_lineno
        fits = node.col_offset + len(line) + len(self.lines[(node.end_lineno or 1) - 1].strip()) <= 120
        return line if is_plain and fits else ""

    def _is_left_out(self, node: ast.Call, keyword: ast.keyword) -> bool:
        """Whether an argument is that of a field that is left out, the called function's default, or unused."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if keyword.arg in self.known.members.get(name, ()):
            return True
        if keyword.arg == "scheduler" and "job.lr_scheduler(optimizer)" in self.known.unused:
            return True
        default = self.known.defaults.get(name, {}).get(keyword.arg or "", UNKNOWN)
        return isinstance(keyword.value, ast.Constant) and keyword.value.value is default

    def _place(self, node: Any) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _segment(self, node: Any) -> str:
        begin, end = self._place(node)
        return self.data[begin:end].decode()

    def _text(self, node: ast.AST, text: str) -> Edit:
        return Edit(*self._place(node), text)


def _source(node: ast.expr) -> str:
    """Returns an expression as text, with the quotes that ruff writes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and '"' not in node.value:
        return f'"{ast.unparse(node)[1:-1]}"'
    return ast.unparse(node)


def _first_paragraph(text: str) -> str:
    return text.partition("\n\n")[0]
