"""Finds the lines of a user's source whose effect no recorded call shows: `group["lr"] = …`, `if rank == 0:`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from samestep.judge.source import (
    FUNCTIONS,
    LOOPS,
    NEXT,
    RANK,
    RANKS,
    Source,
    header_of,
    lines_with,
    names_in,
    targets_of,
)

WORKER = re.compile(r"(num_)?workers?(_id|_info)?")
SEED = re.compile(r"(\w+_)?seed(_all|_everything|_offset)?|default_rng|RandomState|set_seed|hash")
IN_PLACE = {"copy_", "mul_", "add_", "lerp_", "_foreach_lerp_", "_foreach_mul_", "load_state_dict", "update_parameters"}


def decisions_by_rank(source: Source, line: int | None = None) -> list[int]:
    """Returns the lines that decide by the rank: around a line, and in the loops around it; all without one."""
    tests = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If | ast.IfExp | ast.While) and lines_with(node.test, RANK)
    ]
    if line is None:
        return sorted({node.test.lineno for node in tests})
    around = list(source.around(line))
    inside = {id(part) for loop in around if isinstance(loop, LOOPS) for part in ast.walk(loop)}
    close = [node for node in tests if node in around or id(node) in inside or _leaves_before(source, node, around)]
    return sorted({node.test.lineno for node in close}, key=lambda number: abs(number - line))


def writes(source: Source, key: str) -> list[int]:
    """Returns the lines that set a parameter group's value, as `group["lr"] = …`."""
    lines = []
    for node in source.statements:
        if not isinstance(node, ast.Assign | ast.AugAssign):
            continue
        for target in ast.walk(node.targets[0] if isinstance(node, ast.Assign) else node.target):
            if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
                continue
            if target.slice.value == key:
                lines.append(node.lineno)
    return lines


def changes_of_gradients(source: Source) -> list[int]:
    """Returns the lines that change `.grad` by hand: that average or clip it."""

    def changes(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return any(_is_gradient(target) for target in targets)
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        return is_call and node.func.attr.endswith("_") and _is_gradient(node.func.value)  # type: ignore[attr-defined]

    return _lines_where(source, changes)


def changes_of_weights(source: Source) -> list[int]:
    """Returns the lines that change weights by hand: moving averages, copies, weights that are loaded."""

    def changes(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign):
            return any(isinstance(target, ast.Attribute) and target.attr == "data" for target in node.targets)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            return False
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        return name in IN_PLACE and ".grad" not in ast.unparse(node)

    return _lines_where(source, changes)


def changes_of(source: Source, attribute: str) -> list[int]:
    """Returns the lines that change a tensor which an object holds under a name, as `source.queue[:, a:b] = …`."""

    def changes(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            held = [target.value if _is_part(target) else target for target in targets]  # type: ignore[attr-defined]
            return any(isinstance(target, ast.Attribute) and target.attr == attribute for target in held)
        in_place = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr[-1:] == "_"
        return in_place and f".{attribute}" in ast.unparse(node.func.value)  # type: ignore[attr-defined]

    return _lines_where(source, changes)


def shares(source: Source) -> list[int]:
    """Returns the lines that set where a rank, or a worker, reads: first those that do not ask for its number, though
    other lines that set the same name do; then those other lines."""
    set_by: dict[str, dict[int, bool]] = {}  # name -> line -> whether it asks for the rank, the ranks or the worker
    for statement in source.statements:
        if isinstance(statement, ast.Assign | ast.AugAssign) and not source.only_asks(statement.lineno, RANKS):
            asks = any(lines_with(statement, names) for names in (RANK, RANKS, WORKER))
            for name in _places(statement):
                set_by.setdefault(name, {})[statement.lineno] = asks
    shared = [lines for lines in set_by.values() if any(lines.values())]
    return [line for wanted in (False, True) for lines in shared for line, asks in lines.items() if asks == wanted]


def seeds(source: Source) -> list[int]:
    """Returns the lines that seed a random generator, or compute a seed."""

    def seeds(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign):
            return any(SEED.fullmatch(name) for name in targets_of(node))
        return isinstance(node, ast.Call) and bool(SEED.fullmatch(ast.unparse(node.func).rpartition(".")[2]))

    return _lines_where(source, seeds)


def freezes(source: Source) -> list[int]:
    """Returns the lines that set whether parameters are trained."""

    def sets(node: ast.AST) -> bool:
        if isinstance(node, ast.Assign):
            return any(isinstance(part, ast.Attribute) and part.attr == "requires_grad" for part in node.targets)
        return isinstance(node, ast.Attribute) and node.attr == "requires_grad_"

    return _lines_where(source, sets)


def synchronisation(source: Source) -> list[int]:
    """Returns the lines that say in which micro-batch gradients are reduced."""

    def says(node: ast.AST) -> bool:
        words = ("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync", "set_is_last_backward")
        return isinstance(node, ast.Attribute) and node.attr in words

    return _lines_where(source, says)


def ends_of_loops(source: Source) -> list[int]:
    """Returns the lines of `break` in loops, and of what they depend on."""
    ends = [node.lineno for node in source.statements if isinstance(node, ast.Break)]
    tests = [node.lineno for line in ends for node in source.around(line) if isinstance(node, ast.If)]
    return [*ends, *dict.fromkeys(tests)]


def finite_checks(source: Source) -> list[int]:
    """Returns the lines that ask whether a value is finite."""
    return [line for name in ("isfinite", "isnan", "isinf") for line in calls(source, name)]


def impossible_conditions(source: Source) -> list[int]:
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

    return _lines_where(source, lambda node: isinstance(node, ast.If) and needs_it(node.test))


def functions_that_average(source: Source) -> dict[str, int]:
    """Returns the functions that change one model's parameters by another's, and their lines."""
    changes = changes_of_weights(source)
    return {
        node.name: node.lineno
        for node in source.statements
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(node.lineno < line <= (node.end_lineno or 0) for line in changes)
        and any(
            isinstance(part, ast.Call) and ast.unparse(part.func) == "zip" and "parameters()" in ast.unparse(part)
            for part in ast.walk(node)
        )
    }


def mentions(source: Source, name: str) -> bool:
    """Returns whether a function or method is called, or handed on, under its name."""
    return any(
        (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
        for node in ast.walk(source.tree)
    )


def aliases(source: Source) -> list[int]:
    """Returns the lines that give another name to what a class, or a library's from_pretrained(), has made."""
    made: set[str] = set()
    for statement in source.statements:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        callee = ast.unparse(statement.value.func).rpartition(".")[2]
        if callee[:1].isupper() or callee in ("from_pretrained", "to", "cuda"):
            made |= targets_of(statement)
    return _lines_where(
        source,
        lambda node: (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and node.value.id in made
            and all(isinstance(target, ast.Name) for target in node.targets)
        ),
    )


def sums_around(source: Source, line: int) -> list[int]:
    """Returns the lines that add up in the loop around a line, and those after it that read what was added up."""
    loops = [source.loop_at(number) for number in source.loops(line)[:1]]
    if not loops or not isinstance(loops[0], LOOPS):
        return []
    sums = [node for node in ast.walk(loops[0]) if isinstance(node, ast.AugAssign)]
    names = {name for node in sums for name in names_in(node.target)}
    scopes, end = source.scopes(loops[0]), loops[0].end_lineno or line
    after = [node for node in source.statements if node.lineno > end and source.scopes(node) == scopes]
    read = sorted(node.lineno for node in after if names & names_in(header_of(node)))[:NEXT]
    return [*(node.lineno for node in sums), *read]


def reads_of_gradients(source: Source) -> list[int]:
    """Returns the lines in which `.grad` stands."""
    return _lines_where(source, lambda node: isinstance(node, ast.Attribute) and node.attr == "grad")


def groups(source: Source) -> list[int]:
    """Returns the lines that choose among parameters, for an optimizer's groups."""

    def chooses(node: ast.AST) -> bool:
        is_list = isinstance(node, ast.ListComp | ast.GeneratorExp | ast.Dict)
        words = ("parameters()", "named_parameters()", "'params'")
        return is_list and any(word in ast.unparse(node) for word in words)

    return _lines_where(source, chooses)


def calls(source: Source, name: str) -> list[int]:
    """Returns the lines that call a function or a method of this name."""
    return _lines_where(
        source, lambda node: isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    )


def strings_with(source: Source, word: str) -> list[int]:
    """Returns the lines of strings that end with a word, as 'layers.*.down_proj' does."""
    ends = re.compile(rf"(?:^|\W){re.escape(word)}$")
    return _lines_where(source, lambda node: isinstance(node, ast.Constant) and bool(ends.search(str(node.value))))


def _leaves_before(source: Source, test: ast.AST, around: list[ast.AST]) -> bool:
    """Returns whether a condition ends the function that is around a line, as `if rank != 0: return`."""
    function = next((node for node in around if isinstance(node, FUNCTIONS)), None)
    leaves = isinstance(test, ast.If) and isinstance(test.body[-1], ast.Return)
    return leaves and function is not None and source.scopes(test)[0] is function


def _lines_where(source: Source, holds: Callable[[ast.AST], bool]) -> list[int]:
    lines = {getattr(node, "lineno", 0) for node in ast.walk(source.tree) if holds(node)}
    return sorted(lines)


def _is_part(target: ast.expr) -> bool:
    """Returns whether a target is a part of a tensor, or its data."""
    return isinstance(target, ast.Subscript) or (isinstance(target, ast.Attribute) and target.attr == "data")


def _places(node: ast.Assign | ast.AugAssign) -> list[str]:
    """Returns the names and attributes that an assignment gives values to, without those that are a rank's number."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    targets = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = [ast.unparse(target) for target in targets if isinstance(target, ast.Name | ast.Attribute)]
    numbers = (RANK, RANKS, WORKER)
    return [name for name in names if not any(number.fullmatch(name.rpartition(".")[2]) for number in numbers)]


def _is_gradient(node: ast.AST) -> bool:
    """Returns whether an expression is a parameter's gradient, or its data."""
    return isinstance(node, ast.Attribute) and (
        node.attr == "grad" or (node.attr == "data" and _is_gradient(node.value))
    )
