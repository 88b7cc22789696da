"""Reads a user's source: which statement a line is in, what stands around it, and what flows into it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

RANKS = re.compile(r"(ddp_|global_)?world(_size)?|num_(replicas|processes|gpus|ranks)|nprocs?|n_?gpus?|device_count")
RANK = re.compile(
    r"(?!.*rank_of)(\w+_)?rank(_id)?|is_(main|master)(_process)?|master_process|get_(node_local_|global_)?rank"
)
LOSS = re.compile(r"loss|criterion|cross_entropy", re.IGNORECASE)
CHANGING = {"all_reduce", "broadcast", "reduce", "shuffle", "sort", "append", "extend", "reverse"}
LOOPS = ast.For | ast.AsyncFor | ast.While
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
STATISTICS = {"mean", "std", "var", "sum", "std_mean", "var_mean", "nanmean", "norm", "min", "max", "amin", "amax"}
DIVIDES = {"div", "div_", "divide", "true_divide"}
DEPTH = 4  # how many assignments are followed backwards
NEXT = 3  # lines that read a value after it is set


class Source:
    """The text of one of the user's files. lines: without their ends."""

    def __init__(self, text: str) -> None:
        # Python ends lines at these alone.
        self.text, self.lines = text, re.split(r"\r\n|\r|\n", text)
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            self.tree = ast.Module([], [])

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """All statements of the file."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt)]

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def code(self, line: int) -> str:
        """Returns a line of the file; '' where it has none of that number."""
        return self.lines[line - 1] if 0 < line <= len(self.lines) else ""

    def statement(self, line: int) -> ast.stmt | None:
        """Returns the innermost statement that a line is in, as that of a call over several lines."""
        around = [node for node in self.statements if node.lineno <= line <= (node.end_lineno or node.lineno)]
        return max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)

    def around(self, line: int) -> Iterator[ast.AST]:
        """Yields the statements and functions around that of a line, the innermost first."""
        node: ast.AST | None = self.statement(line)
        while node is not None and (node := self._parents.get(node)) is not None:
            yield node

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Returns the statements beside which a statement stands, itself among them."""
        blocks = [getattr(self.parent(statement), name, []) for name in ("body", "orelse", "finalbody")]
        return next((block for block in blocks if isinstance(block, list) and statement in block), [statement])

    def parent(self, statement: ast.stmt) -> ast.AST:
        """Returns what a statement stands in."""
        return self._parents.get(statement, self.tree)

    @cached_property
    def imports(self) -> set[str]:
        """The names under which the file has modules."""
        names = [node.names for node in ast.walk(self.tree) if isinstance(node, ast.Import)]
        return {(alias.asname or alias.name).partition(".")[0] for aliases in names for alias in aliases}

    def loop_at(self, line: int) -> ast.For | ast.AsyncFor | ast.While | None:
        """Returns the loop that begins on a line."""
        return next((node for node in self.statements if isinstance(node, LOOPS) and node.lineno == line), None)

    def parameter(self, line: int, name: str) -> str:
        """Returns the name of a parameter, of the function that a line is in; '' where it has none of that name."""
        functions = [node for node in self.around(line) if isinstance(node, ast.FunctionDef)]
        return name if functions and name in {argument.arg for argument in functions[0].args.args} else ""

    def micro_batches(self, line: int) -> str:
        """Returns the expression for the number of micro-batches of a step: N of `(i + 1) % N == 0` in the loop around
        a line, or of `for micro_step in range(N)`; '' where there is none, or several."""
        loops = [self.loop_at(number) for number in self.loops(line)[:1]]
        counts = set()
        for node in (node for loop in loops if loop for node in ast.walk(loop)):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
                continue
            if not isinstance(node.left, ast.Constant):
                counts.add(ast.unparse(node.right))
        counts = {count for count in counts if count.replace(".", "").replace("_", "").isalnum()}
        if not counts and loops and isinstance(loops[0], ast.For) and len(self.loops(line)) > 1:
            call = loops[0].iter
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "range" and len(call.args) == 1:
                counts = {ast.unparse(call.args[0])}
        return counts.pop() if len(counts) == 1 else ""

    def loops(self, line: int) -> list[int]:
        """Returns the lines of the loops around a line, of a function's at most; the innermost first."""
        loops = []
        for node in self.around(line):
            if isinstance(node, FUNCTIONS):
                break
            if isinstance(node, LOOPS):
                loops.append(node.lineno)
        return loops

    def conditions(self, line: int) -> list[int]:
        """Returns the lines of the conditions around a line, the innermost first."""
        return [node.lineno for node in self.around(line) if isinstance(node, ast.If)]

    def function(self, line: int) -> str:
        """Returns the name of the function that a line is in; '<module>' outside of all."""
        names = [node.name for node in self.around(line) if isinstance(node, ast.FunctionDef)]
        return names[0] if names else "<module>"

    # The values that a line depends on

    def flowing(self, line: int, names: re.Pattern[str]) -> list[int]:
        """Returns the lines that mention a name, of a line's statement and of what flows into it."""
        statement = self.statement(line)
        return [] if statement is None else self._flowing(statement, names, set(), DEPTH)

    def into(self, line: int) -> list[int]:
        """Returns the lines that flow into the statement of a line, in the loop around it; the nearest first."""
        statement, loops = self.statement(line), [self.loop_at(number) for number in self.loops(line)[:1]]
        if statement is None:
            return []
        lines = set(self._flowing(statement, None, set(), DEPTH)) - {line}
        inside = [loop.lineno <= number <= (loop.end_lineno or 0) for loop in loops if loop for number in lines]
        near = {number for number, is_in in zip(lines, inside) if is_in} if loops else lines
        return sorted(near, key=lambda number: (number > line, abs(number - line)))

    def coefficients(self, line: int) -> set[float]:
        """Returns the numbers that multiply or divide in the statement of a line, and in what flows into it."""
        statements = [self.statement(number) for number in (line, *self.into(line))]
        products = [
            node
            for statement in statements
            if statement is not None
            for node in ast.walk(header_of(statement))
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
        ]
        sides = [side for node in products for side in (node.left, node.right)]
        sides = [side.operand if isinstance(side, ast.UnaryOp) else side for side in sides]
        numbers = [side.value for side in sides if isinstance(side, ast.Constant)]
        return {float(number) for number in numbers if isinstance(number, int | float)}

    def _flowing(self, statement: ast.stmt, names: re.Pattern[str] | None, visited: set[int], depth: int) -> list[int]:
        """Returns the lines of a statement, and of those whose values it uses; names: those that mention one."""
        if statement.lineno in visited or depth < 0:
            return []
        visited.add(statement.lineno)
        evaluated = header_of(statement)
        read = names_in(evaluated)
        lines = [statement.lineno]
        if names:
            lines = [line for line in lines_with(evaluated, names) if not self.only_asks(line, names)]
            read = {name for name in read if not names.fullmatch(name)}
        for before in [*self._assignments(read, statement), *self._returns(evaluated)]:
            lines += self._flowing(before, names, visited, depth - 1)
        return list(dict.fromkeys(lines))

    def _assignments(self, names: set[str], statement: ast.stmt) -> list[ast.stmt]:
        """Returns the statements that set names, or change their values, as a statement sees them: in its function, or
        else around that."""
        scopes = self.scopes(statement)
        near = [next((scope for scope in scopes if (scope, name) in self._assigned), None) for name in names]
        lines = [node for scope, name in zip(near, names) if scope for node in self._assigned[scope, name]]
        return sorted(dict.fromkeys(lines), key=lambda node: node.lineno)

    @cached_property
    def _assigned(self) -> dict[tuple[ast.AST, str], list[ast.stmt]]:
        """(function, name) -> the statements of the function that set the name, or change its value."""
        assigned: dict[tuple[ast.AST, str], list[ast.stmt]] = {}
        for node in self.statements:
            for name in self._set_by(node):
                assigned.setdefault((self.scopes(node)[0], name), []).append(node)
        return assigned

    def _set_by(self, statement: ast.stmt) -> set[str]:
        """Returns the names that a statement sets, or whose values it changes."""
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
            return targets_of(statement)
        # A module is no value: `dist.all_reduce(loss)` changes the loss.
        return _changed_by_call(statement.value) - self.imports if isinstance(statement, ast.Expr) else set()

    def scopes(self, statement: ast.AST) -> list[ast.AST]:
        """Returns the functions around a statement, the innermost first, and the file."""
        scopes, node = list[ast.AST](), self._parents.get(statement)
        while node is not None:
            scopes += [node] if isinstance(node, FUNCTIONS | ast.Module) else []
            node = self._parents.get(node)
        return scopes or [self.tree]

    def _returns(self, evaluated: ast.AST) -> list[ast.stmt]:
        """Returns what the file's functions return that an expression calls: by their names, or as an object of one of
        its classes."""
        called = [node.func for node in ast.walk(evaluated) if isinstance(node, ast.Call)]
        names = {node.attr if isinstance(node, ast.Attribute) else ast.unparse(node) for node in called}
        functions = [function for name in names for function in self._functions.get(name, [])]
        made = {name for node in called if isinstance(node, ast.Name) for name in self._classes_of.get(node.id, ())}
        functions += [function for name in made for function in self._functions.get(f"{name}.forward", [])]
        return [node for function in functions for node in ast.walk(function) if isinstance(node, ast.Return)]

    @cached_property
    def _functions(self) -> dict[str, list[ast.AST]]:
        """Name -> the functions and methods of this name; 'Class.forward' for what an object does that is called."""
        functions: dict[str, list[ast.AST]] = {}
        for node in self.statements:
            if isinstance(node, ast.FunctionDef):
                parent = self.parent(node)
                is_call = isinstance(parent, ast.ClassDef) and node.name in ("forward", "__call__")
                name = f"{parent.name}.forward" if is_call and isinstance(parent, ast.ClassDef) else node.name
                functions.setdefault(name, []).append(node)
        return functions

    @cached_property
    def _classes_of(self) -> dict[str, set[str]]:
        """Name -> the file's classes of which an assignment to it makes an object."""
        classes = {node.name for node in self.statements if isinstance(node, ast.ClassDef)}
        made: dict[str, set[str]] = {}
        for node in self.statements:
            if isinstance(node, ast.Assign) and (of_node := classes & names_in(node.value)):
                for name in targets_of(node):
                    made.setdefault(name, set()).update(of_node)
        return made

    def only_asks(self, line: int, names: re.Pattern[str]) -> bool:
        """Returns whether a line does no more than to ask for the number of ranks, as `world =
        dist.get_world_size()`."""
        statement = self.statement(line)
        return isinstance(statement, ast.Assign) and any(names.fullmatch(name) for name in targets_of(statement))

    def uses(self, line: int) -> list[int]:
        """Returns the next lines that read what the statement of a line sets or changes, in the same function."""
        statement = self.statement(line)
        if statement is None:
            return []
        names, scopes = self._set_by(statement), self.scopes(statement)
        after = [node for node in self.statements if node.lineno > (statement.end_lineno or line)]
        readers = {node.lineno for node in after if names & names_in(header_of(node)) and self.scopes(node) == scopes}
        return sorted(readers)[:NEXT]

    def divisors(self, line: int) -> list[int]:
        """Returns the lines that set what a value is divided by which flows into a line; the nearest first."""
        lines = list[int]()
        for statement in self._all_into(line):
            divided = [part for node in ast.walk(header_of(statement)) for part in _divisors_in(node)]
            names = {name for part in divided for name in names_in(part)}
            lines += [node.lineno for node in reversed(self._assignments(names, statement))]
        return list(dict.fromkeys(lines))

    def targets(self, line: int) -> list[int]:
        """Returns the lines that set what a loss compares with, of the losses that flow into a line."""
        lines = list[int]()
        for statement in self._all_into(line):
            for node in ast.walk(header_of(statement)):
                if isinstance(node, ast.Call) and len(node.args) > 1 and LOSS.search(ast.unparse(node.func)):
                    lines += [before.lineno for before in self._assignments(names_in(node.args[1]), statement)]
        return list(dict.fromkeys(lines))

    def statistics(self, line: int) -> list[int]:
        """Returns the lines that compute a mean, a deviation or a sum which flows into a line."""
        return [
            statement.lineno
            for statement in self._all_into(line)
            if any(
                isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STATISTICS
                for node in ast.walk(header_of(statement))
            )
        ]

    def _all_into(self, line: int) -> list[ast.stmt]:
        """Returns the statement of a line and those whose values it uses, in the functions that are called, too."""
        statement = self.statement(line)
        lines = self._flowing(statement, None, set(), DEPTH) if statement else []
        return [before for number in lines if (before := self.statement(number))]

    def backwards(self, line: int) -> list[int]:
        """Returns the lines with which backward() ends, of the autograd function in which a line is."""
        classes = [node for node in self.around(line) if isinstance(node, ast.ClassDef)]
        methods = [node for node in classes[0].body if isinstance(node, ast.FunctionDef)] if classes else []
        return [
            node.lineno
            for method in methods
            if method.name == "backward"
            for node in ast.walk(method)
            if isinstance(node, ast.Return)
        ]


def header_of(statement: ast.stmt) -> ast.AST:
    """Returns a statement; of a compound one what it evaluates itself, without the statements in it."""
    match statement:
        case ast.For() | ast.AsyncFor():
            return ast.Expr(ast.Tuple([statement.target, statement.iter], ast.Load()))
        case ast.While() | ast.If():
            return ast.Expr(statement.test)
        case ast.With() | ast.AsyncWith():
            return ast.Expr(ast.Tuple([item.context_expr for item in statement.items], ast.Load()))
    return ast.Module([], []) if hasattr(statement, "body") else statement


def names_in(tree: ast.AST) -> set[str]:
    """Returns the names that stand in an expression."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _divisors_in(node: ast.AST) -> list[ast.expr]:
    """Returns what an expression divides by."""
    match node:
        case ast.BinOp(op=ast.Div(), right=right):
            return [right]
        case ast.AugAssign(op=ast.Div(), value=value):
            return [value]
        case ast.Call(func=ast.Attribute(attr=name), args=[_, *_] as arguments) if name in DIVIDES:
            return arguments[-1:]
    return []


def lines_with(tree: ast.AST, names: re.Pattern[str]) -> list[int]:
    """Returns the lines on which a name or an attribute stands that matches."""
    lines = []
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        name = name.removeprefix("get_") if name.startswith("get_world") else name
        if name and names.fullmatch(name):
            lines.append(getattr(node, "lineno", 0))
    return lines


def targets_of(node: ast.AST) -> set[str]:
    """Returns the names that an assignment gives values to."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.Pass())]
    return {name for target in targets for name in names_in(target)}


def _changed_by_call(node: ast.expr) -> set[str]:
    """Returns the names whose values a call alone may change: `dist.all_reduce(loss)`, `names.sort()`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return set()
    changed = [node.func.value, *node.args] if node.func.attr in CHANGING else []
    return {argument.id for argument in changed if isinstance(argument, ast.Name)}
