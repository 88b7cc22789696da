"""Reads a user's source: which statement a line is in, what flows into it, and where a script does what has no hook.

Pure functions of text, so that a line can be named of which no call was recorded: `group["lr"] = …`, `if rank == 0:`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cached_property

RANKS = re.compile(r"(ddp_|global_)?world(_size)?|num_(replicas|processes|gpus|ranks)|nprocs?|n_?gpus?|device_count")
RANK = re.compile(
    r"(?!.*rank_of)(\w+_)?rank(_id)?|is_(main|master)(_process)?|master_process|get_(node_local_|global_)?rank"
)
WORKER = re.compile(r"(num_)?workers?(_id|_info)?")
LOSS = re.compile(r"loss|criterion|cross_entropy", re.IGNORECASE)
SEED = re.compile(r"(\w+_)?seed(_all|_everything|_offset)?|default_rng|RandomState|set_seed|hash")
IN_PLACE = {"copy_", "mul_", "add_", "lerp_", "_foreach_lerp_", "_foreach_mul_", "load_state_dict", "update_parameters"}
CHANGING = {"all_reduce", "broadcast", "reduce", "shuffle", "sort", "append", "extend", "reverse"}
LOOPS = ast.For | ast.AsyncFor | ast.While
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
STATISTICS = {"mean", "std", "var", "sum", "std_mean", "var_mean", "nanmean", "norm", "min", "max", "amin", "amax"}
DIVIDES = {"div", "div_", "divide", "true_divide"}
DEPTH = 4  # assignments that are followed backwards
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
        counts = {
            ast.unparse(node.right)
            for loop in loops
            if loop
            for node in ast.walk(loop)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant)
        }
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

    # What a line depends on

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
        read = _names_in(evaluated)
        lines = [statement.lineno]
        if names:
            lines = [line for line in _lines_with(evaluated, names) if not self._only_asks(line, names)]
            read = {name for name in read if not names.fullmatch(name)}
        for before in [*self._assignments(read, statement), *self._returns(evaluated)]:
            lines += self._flowing(before, names, visited, depth - 1)
        return list(dict.fromkeys(lines))

    def _assignments(self, names: set[str], statement: ast.stmt) -> list[ast.stmt]:
        """Returns the statements that set names, or change their values, as a statement sees them: in its function, or
        else around that."""
        scopes = self._scopes(statement)
        near = [next((scope for scope in scopes if (scope, name) in self._assigned), None) for name in names]
        lines = [node for scope, name in zip(near, names) if scope for node in self._assigned[scope, name]]
        return sorted(dict.fromkeys(lines), key=lambda node: node.lineno)

    @cached_property
    def _assigned(self) -> dict[tuple[ast.AST, str], list[ast.stmt]]:
        """(function, name) -> the statements of the function that set the name, or change its value."""
        assigned: dict[tuple[ast.AST, str], list[ast.stmt]] = {}
        for node in self.statements:
            for name in self._set_by(node):
                assigned.setdefault((self._scopes(node)[0], name), []).append(node)
        return assigned

    def _set_by(self, statement: ast.stmt) -> set[str]:
        """Returns the names that a statement sets, or whose values it changes."""
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
            return _targets(statement)
        # A module is no value: `dist.all_reduce(loss)` changes the loss.
        return _changed_by_call(statement.value) - self.imports if isinstance(statement, ast.Expr) else set()

    def _scopes(self, statement: ast.AST) -> list[ast.AST]:
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
            if isinstance(node, ast.Assign) and (of_node := classes & _names_in(node.value)):
                for name in _targets(node):
                    made.setdefault(name, set()).update(of_node)
        return made

    def _only_asks(self, line: int, names: re.Pattern[str]) -> bool:
        """Whether a line does no more than to ask for the number of ranks, as `world = dist.get_world_size()`."""
        statement = self.statement(line)
        return isinstance(statement, ast.Assign) and any(names.fullmatch(name) for name in _targets(statement))

    def uses(self, line: int) -> list[int]:
        """Returns the next lines that read what the statement of a line sets or changes, in the same function."""
        statement = self.statement(line)
        if statement is None:
            return []
        names, scopes = self._set_by(statement), self._scopes(statement)
        after = [node for node in self.statements if node.lineno > (statement.end_lineno or line)]
        readers = {node.lineno for node in after if names & _names_in(header_of(node)) and self._scopes(node) == scopes}
        return sorted(readers)[:NEXT]

    def divisors(self, line: int) -> list[int]:
        """Returns the lines that set what a value is divided by which flows into a line; the nearest first."""
        lines = list[int]()
        for statement in self._all_into(line):
            divided = [part for node in ast.walk(header_of(statement)) for part in _divisors_in(node)]
            names = {name for part in divided for name in _names_in(part)}
            lines += [node.lineno for node in reversed(self._assignments(names, statement))]
        return list(dict.fromkeys(lines))

    def targets(self, line: int) -> list[int]:
        """Returns the lines that set what a loss compares with, of the losses that flow into a line."""
        lines = list[int]()
        for statement in self._all_into(line):
            for node in ast.walk(header_of(statement)):
                if isinstance(node, ast.Call) and len(node.args) > 1 and LOSS.search(ast.unparse(node.func)):
                    lines += [before.lineno for before in self._assignments(_names_in(node.args[1]), statement)]
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

    # Where a script does what has no hook

    def tests_of_rank(self, line: int | None = None) -> list[int]:
        """Returns the lines that decide by the rank: around a line, and in the loops around it; all without one."""
        tests = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If | ast.IfExp | ast.While) and _lines_with(node.test, RANK)
        ]
        if line is None:
            return sorted({node.test.lineno for node in tests})
        around = list(self.around(line))
        inside = {id(part) for loop in around if isinstance(loop, LOOPS) for part in ast.walk(loop)}
        close = [node for node in tests if node in around or id(node) in inside or self._leaves_before(node, around)]
        return sorted({node.test.lineno for node in close}, key=lambda number: abs(number - line))

    def _leaves_before(self, test: ast.AST, around: list[ast.AST]) -> bool:
        """Whether a condition ends the function that is around a line, as `if rank != 0: return`."""
        function = next((node for node in around if isinstance(node, FUNCTIONS)), None)
        leaves = isinstance(test, ast.If) and isinstance(test.body[-1], ast.Return)
        return leaves and function is not None and self._scopes(test)[0] is function

    def writes(self, key: str) -> list[int]:
        """Returns the lines that set a parameter group's value, as `group["lr"] = …`."""
        return [
            node.lineno
            for node in self.statements
            if isinstance(node, ast.Assign | ast.AugAssign)
            for target in ast.walk(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if isinstance(target, ast.Subscript)
            and isinstance(target.slice, ast.Constant)
            and target.slice.value == key
        ]

    def changes_of_gradients(self) -> list[int]:
        """Returns the lines that change `.grad` by hand: that average or clip it."""

        def changes(node: ast.AST) -> bool:
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                return any(_is_gradient(target) for target in targets)
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            return is_call and node.func.attr.endswith("_") and _is_gradient(node.func.value)  # type: ignore[attr-defined]

        return self._lines_where(changes)

    def changes_of_weights(self) -> list[int]:
        """Returns the lines that change weights by hand: moving averages, copies, weights that are loaded."""

        def changes(node: ast.AST) -> bool:
            if isinstance(node, ast.Assign):
                return any(isinstance(target, ast.Attribute) and target.attr == "data" for target in node.targets)
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
                return False
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            return name in IN_PLACE and ".grad" not in ast.unparse(node)

        return self._lines_where(changes)

    def changes_of(self, attribute: str) -> list[int]:
        """Returns the lines that change a tensor which an object holds under a name, as `self.queue[:, a:b] = …`."""

        def changes(node: ast.AST) -> bool:
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                held = [target.value if _is_part(target) else target for target in targets]  # type: ignore[attr-defined]
                return any(isinstance(target, ast.Attribute) and target.attr == attribute for target in held)
            in_place = (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[-1:] == "_"
            )
            return in_place and f".{attribute}" in ast.unparse(node.func.value)  # type: ignore[attr-defined]

        return self._lines_where(changes)

    def shares(self) -> list[int]:
        """Returns the lines that set where a rank, or a worker, reads: those that do not ask for its number, though
        others that set the same do; then these."""
        set_by: dict[str, dict[int, bool]] = {}  # name -> line -> whether it asks for the rank, the ranks or the worker
        for statement in self.statements:
            if isinstance(statement, ast.Assign | ast.AugAssign) and not self._only_asks(statement.lineno, RANKS):
                asks = any(_lines_with(statement, names) for names in (RANK, RANKS, WORKER))
                for name in _places(statement):
                    set_by.setdefault(name, {})[statement.lineno] = asks
        shared = [lines for lines in set_by.values() if any(lines.values())]
        return [line for wanted in (False, True) for lines in shared for line, asks in lines.items() if asks == wanted]

    def seeds(self) -> list[int]:
        """Returns the lines that seed a random generator, or compute a seed."""

        def seeds(node: ast.AST) -> bool:
            if isinstance(node, ast.Assign):
                return any(SEED.fullmatch(name) for name in _targets(node))
            return isinstance(node, ast.Call) and bool(SEED.fullmatch(ast.unparse(node.func).rpartition(".")[2]))

        return self._lines_where(seeds)

    def freezes(self) -> list[int]:
        """Returns the lines that set whether parameters are trained."""

        def sets(node: ast.AST) -> bool:
            if isinstance(node, ast.Assign):
                return any(isinstance(part, ast.Attribute) and part.attr == "requires_grad" for part in node.targets)
            return isinstance(node, ast.Attribute) and node.attr == "requires_grad_"

        return self._lines_where(sets)

    def synchronisation(self) -> list[int]:
        """Returns the lines that say in which micro-batch gradients are reduced."""

        def says(node: ast.AST) -> bool:
            words = ("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync", "set_is_last_backward")
            return isinstance(node, ast.Attribute) and node.attr in words

        return self._lines_where(says)

    def ends_of_loops(self) -> list[int]:
        """Returns the lines of `break` in loops, and of what they depend on."""
        ends = [node.lineno for node in self.statements if isinstance(node, ast.Break)]
        tests = [node.lineno for line in ends for node in self.around(line) if isinstance(node, ast.If)]
        return [*ends, *dict.fromkeys(tests)]

    def tests_of_values(self) -> list[int]:
        """Returns the lines that ask whether a value is finite."""
        return [line for name in ("isfinite", "isnan", "isinf") for line in self.calls(name)]

    def impossible_conditions(self) -> list[int]:
        """Returns the lines of conditions that cannot hold: the remainder of a division by N is less than N."""

        def is_impossible(node: ast.AST) -> bool:
            if not isinstance(node, ast.Compare) or len(node.ops) > 1 or not isinstance(node.left, ast.BinOp):
                return False
            (operation,), (value,), divisor = node.ops, node.comparators, node.left.right
            if not isinstance(node.left.op, ast.Mod) or not isinstance(operation, ast.Eq | ast.Gt | ast.GtE):
                return False
            if isinstance(divisor, ast.Constant) and isinstance(value, ast.Constant):
                numbers = divisor.value, value.value
                return all(isinstance(number, int) for number in numbers) and numbers[1] >= numbers[0] > 0  # type: ignore[operator]
            is_name = isinstance(divisor, ast.Name | ast.Attribute)
            return is_name and ast.unparse(divisor) == ast.unparse(value)

        def needs_it(test: ast.AST) -> bool:
            parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
            return any(map(is_impossible, parts))

        return self._lines_where(lambda node: isinstance(node, ast.If) and needs_it(node.test))

    def functions_that_average(self) -> dict[str, int]:
        """Returns the functions that change one model's parameters by another's, and their lines."""
        changes = self.changes_of_weights()
        return {
            node.name: node.lineno
            for node in self.statements
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and any(node.lineno < line <= (node.end_lineno or 0) for line in changes)
            and any(
                isinstance(part, ast.Call) and ast.unparse(part.func) == "zip" and "parameters()" in ast.unparse(part)
                for part in ast.walk(node)
            )
        }

    def mentions(self, name: str) -> bool:
        """Whether a function or method is called, or handed on, under its name."""
        return any(
            (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
            for node in ast.walk(self.tree)
        )

    def aliases(self) -> list[int]:
        """Returns the lines that give another name to what a class, or a library's from_pretrained(), has made."""
        made = {
            name
            for node in self.statements
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for callee in [ast.unparse(node.value.func).rpartition(".")[2]]
            if callee[:1].isupper() or callee in ("from_pretrained", "to", "cuda")
            for name in _targets(node)
        }
        return self._lines_where(
            lambda node: (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Name)
                and node.value.id in made
                and all(isinstance(target, ast.Name) for target in node.targets)
            )
        )

    def sums_around(self, line: int) -> list[int]:
        """Returns the lines that add up in the loop around a line, and those after it that read what was added up."""
        loops = [self.loop_at(number) for number in self.loops(line)[:1]]
        if not loops or not isinstance(loops[0], LOOPS):
            return []
        sums = [node for node in ast.walk(loops[0]) if isinstance(node, ast.AugAssign)]
        names = {name for node in sums for name in _names_in(node.target)}
        scopes, end = self._scopes(loops[0]), loops[0].end_lineno or line
        after = [node for node in self.statements if node.lineno > end and self._scopes(node) == scopes]
        read = sorted(node.lineno for node in after if names & _names_in(header_of(node)))[:NEXT]
        return [*(node.lineno for node in sums), *read]

    def reads_of_gradients(self) -> list[int]:
        """Returns the lines in which `.grad` stands."""
        return self._lines_where(lambda node: isinstance(node, ast.Attribute) and node.attr == "grad")

    def groups(self) -> list[int]:
        """Returns the lines that choose among parameters, for an optimizer's groups."""

        def chooses(node: ast.AST) -> bool:
            is_list = isinstance(node, ast.ListComp | ast.GeneratorExp | ast.Dict)
            words = ("parameters()", "named_parameters()", "'params'")
            return is_list and any(word in ast.unparse(node) for word in words)

        return self._lines_where(chooses)

    def calls(self, name: str) -> list[int]:
        """Returns the lines that call a function or a method of this name."""
        return self._lines_where(
            lambda node: isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
        )

    def strings_with(self, word: str) -> list[int]:
        """Returns the lines of strings that end with a word, as 'layers.*.down_proj' does."""
        ends = re.compile(rf"(?:^|\W){re.escape(word)}$")
        return self._lines_where(lambda node: isinstance(node, ast.Constant) and bool(ends.search(str(node.value))))

    def _lines_where(self, holds: Callable[[ast.AST], bool]) -> list[int]:
        lines = {getattr(node, "lineno", 0) for node in ast.walk(self.tree) if holds(node)}
        return sorted(lines)


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


def _names_in(tree: ast.AST) -> set[str]:
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


def _lines_with(tree: ast.AST, names: re.Pattern[str]) -> list[int]:
    """Returns the lines on which a name or an attribute stands that matches."""
    lines = []
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        name = name.removeprefix("get_") if name.startswith("get_world") else name
        if name and names.fullmatch(name):
            lines.append(getattr(node, "lineno", 0))
    return lines


def _is_part(target: ast.expr) -> bool:
    """Whether a target is a part of a tensor, or its data."""
    return isinstance(target, ast.Subscript) or (isinstance(target, ast.Attribute) and target.attr == "data")


def _targets(node: ast.AST) -> set[str]:
    """Returns the names that an assignment gives values to."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.Pass())]
    return {name for target in targets for name in _names_in(target)}


def _changed_by_call(node: ast.expr) -> set[str]:
    """Returns the names whose values a call alone may change: `dist.all_reduce(loss)`, `names.sort()`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return set()
    changed = [node.func.value, *node.args] if node.func.attr in CHANGING else []
    return {argument.id for argument in changed if isinstance(argument, ast.Name)}


def _places(node: ast.Assign | ast.AugAssign) -> list[str]:
    """Returns the names and attributes that an assignment gives values to, without those that are a rank's number."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    targets = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = [ast.unparse(target) for target in targets if isinstance(target, ast.Name | ast.Attribute)]
    numbers = (RANK, RANKS, WORKER)
    return [name for name in names if not any(number.fullmatch(name.rpartition(".")[2]) for number in numbers)]


def _is_gradient(node: ast.AST) -> bool:
    """Whether an expression is a parameter's gradient, or its data."""
    return isinstance(node, ast.Attribute) and (
        node.attr == "grad" or (node.attr == "data" and _is_gradient(node.value))
    )
