"""Reads from a user's source whether a learning rate that is set by hand is multiplied by the number of ranks.

Only products are followed: names, attributes, parameter group's values and functions that are factors of a value
assigned to `group["lr"]`. A number of ranks in a schedule's length, or in a count of steps or rows, is no factor of the
rate.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from samestep.judge.edits import is_ranks
from samestep.judge.source import Source
from samestep.judge.source_search import writes

DEPTH = 6  # the deepest chain of names and functions that is followed
# A factor that counts: steps and epochs, of which a schedule is made, or rows, by which a rate may grow on purpose.
COUNTS = re.compile(
    r"(?i).*(iter|step|epoch|batch|progress|sample|token|row|image|warm).*|it|i|t|n|k|bs|eff\w*|total\w*|global_bs"
)
LOADER = re.compile(r"(?i).*(load|iter|batches).*|dl")
Place = tuple[str, int]  # file and line
Values = Mapping[str, ast.expr]  # parameter -> its argument in a call
N = TypeVar("N", bound=ast.AST)


@dataclass
class RateFactors:
    """The factors of the rates that a script sets by hand. sources: path of a file -> its source."""

    sources: Mapping[str, Source]
    _visited: set[int] = field(default_factory=set)

    def times_ranks(self, optimizers: Sequence[Place] = ()) -> list[Place]:
        """Returns the lines in which the number of ranks is a factor of a rate that is set by hand, or given to one of
        the optimizers that are made in some lines."""
        self._visited.clear()
        made = []
        for file, line in optimizers:
            if file not in self.sources:
                continue
            for call in _parts(self.sources[file].statement(line), ast.Call):
                made += [(file, keyword.value) for keyword in call.keywords if keyword.arg == "lr"]
        places = [
            place
            for file, source in self.sources.items()
            for value in _all_assigned(source, lambda target: _key(target) == "lr")
            for place in self._ranks_in(file, value, {}, DEPTH)
        ]
        places += [place for file, value in made for place in self._ranks_in(file, value, {}, DEPTH)]
        places += [place for file, value in self._multipliers() for place in self._ranks_in(file, value, {}, DEPTH)]
        return list(dict.fromkeys(places))

    def _multipliers(self) -> Iterator[tuple[str, ast.expr]]:
        """Yields the factors by which LambdaLR multiplies a rate, unless the argument of its function, a count, is one
        of them."""
        for file, source in self.sources.items():
            for call in _parts(source.tree, ast.Call):
                if _name(call.func) != "LambdaLR":
                    continue
                words = [word.value for word in call.keywords if word.arg == "lr_lambda"]
                for value in call.args[1:2] + words:
                    is_lambda = isinstance(value, ast.Lambda)
                    for place, function in [(file, value)] if is_lambda else self._functions(ast.unparse(value)):
                        yield from ((place, body) for body in _returned(function) if not _has_argument(function, body))

    def time_of_ranks(self) -> list[Place]:
        """Returns the lines in which the number of ranks multiplies a share of a rank's own loader, as
        `(step / len(loader) + epoch) * world`, in what is given to the function that sets a rate."""
        return [
            (file, product.lineno)
            for file, product, factors in self._times()
            if any(map(is_ranks, factors))
            and any(self._divides_by_loader(self.sources[file], factor) for factor in factors if not is_ranks(factor))
        ]

    def time_of_micro_batches(self, count: str) -> list[Place]:
        """Returns the lines in which the number of micro-batches of a step multiplies what is given to the function
        that sets a rate. count: its expression."""
        return [
            (file, product.lineno)
            for file, product, factors in self._times()
            if count and any(ast.unparse(factor) == count for factor in factors)
        ]

    def _times(self) -> Iterator[tuple[str, ast.BinOp, list[ast.expr]]]:
        """Yields the products, and their factors, among what is given to functions that compute or set a rate."""
        setters = {source.function(line) for source in self.sources.values() for line in writes(source, "lr")}
        for file, source in self.sources.items():
            rates = _all_assigned(source, lambda target: _key(target) == "lr")
            names = {ast.unparse(rate) for rate in rates if isinstance(rate, ast.Name)}
            rates += _all_assigned(source, lambda target, names=names: ast.unparse(target) in names)  # type: ignore[misc]
            flows = [call for rate in rates for call in _parts(rate, ast.Call)]
            calls = [node for node in _parts(source.tree, ast.Call) if _name(node.func) in setters - {"<module>"}]
            for call in (*flows, *calls):
                for product in (node for argument in call.args for node in _parts(argument, ast.BinOp)):
                    if isinstance(product.op, ast.Mult):
                        yield file, product, _factors(product)[0]

    def _divides_by_loader(self, source: Source, value: ast.expr) -> bool:
        divisors = [node.right for node in _parts(value, ast.BinOp) if isinstance(node.op, ast.Div | ast.FloorDiv)]
        named = {
            ast.unparse(target)
            for node in _parts(source.tree, ast.Assign)
            if _is_length(node.value)
            for target in node.targets
        }
        return any(
            _is_length(part) or ast.unparse(part) in named for node in divisors for part in _parts(node, ast.expr)
        )

    def _ranks_in(self, file: str, value: ast.expr, given: Values, depth: int) -> Iterator[Place]:
        """Yields the lines of a value's product, and of those of its factors, in which the number of ranks stands."""
        if depth < 0 or id(value) in self._visited:
            return
        self._visited.add(id(value))
        if isinstance(value, ast.IfExp):
            for branch in (value.body, value.orelse):
                yield from self._ranks_in(file, branch, given, depth)
            return
        factors, divisors = _factors(value)
        if any(map(is_ranks, factors)):
            if not any(map(is_ranks, divisors)) and not any(map(_counts, factors)):
                yield file, value.lineno
            return
        for factor in factors:
            if not _counts(factor):
                yield from self._followed(file, factor, given, depth - 1)

    def _followed(self, file: str, factor: ast.expr, given: Values, depth: int) -> Iterator[Place]:
        """Yields the places for the value that was assigned to a factor, or that a function of the user's returns."""
        source, name = self.sources[file], ast.unparse(factor)
        if isinstance(factor, ast.Name) and name in given:
            yield from self._ranks_in(file, given[name], {}, depth)
        elif isinstance(factor, ast.Name | ast.Attribute):
            for statement in source.statements:
                for value in _assigned(statement, lambda target: ast.unparse(target) == name):
                    yield from self._ranks_in(file, value, given, depth)
        elif _key(factor) in ("lr", "initial_lr"):
            keywords = (keyword for call in _parts(source.tree, ast.Call) for keyword in call.keywords)
            for value in (keyword.value for keyword in keywords if keyword.arg == "lr"):
                yield from self._ranks_in(file, value, {}, depth)
        elif isinstance(factor, ast.Call) and _name(factor.func) in ("float", "int") and len(factor.args) == 1:
            yield from self._ranks_in(file, factor.args[0], given, depth)
        elif isinstance(factor, ast.Call):
            for function_file, function in self._functions(_name(factor.func)):
                for value in _returned(function):
                    yield from self._ranks_in(function_file, value, _given(function, factor), depth)

    def _functions(self, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        """Yields the functions of a name, with their files."""
        for file, source in self.sources.items():
            yield from ((file, node) for node in _parts(source.tree, ast.FunctionDef) if node.name == name)


def _factors(value: ast.expr) -> tuple[list[ast.expr], list[ast.expr]]:
    """Returns the factors of a product, and what it is divided by."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        (left, under_left), (right, under_right) = _factors(value.left), _factors(value.right)
        return left + right, under_left + under_right
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        factors, divisors = _factors(value.left)
        return factors, [*divisors, value.right]
    return [value], []


def _counts(factor: ast.expr) -> bool:
    """Returns whether a factor counts steps or rows, so that the product it stands in is a count, too."""
    name = factor.attr if isinstance(factor, ast.Attribute) else factor.id if isinstance(factor, ast.Name) else ""
    is_sum = (
        isinstance(factor, ast.BinOp)
        and not isinstance(factor.op, ast.Pow)
        and any(map(_counts, (factor.left, factor.right)))
    )
    is_length = isinstance(factor, ast.Call) and _name(factor.func) == "len"
    return bool(name and COUNTS.fullmatch(name) and not is_ranks(factor)) or is_sum or is_length


def _assigned(statement: ast.AST | None, is_target: Callable[[ast.expr], bool]) -> Iterator[ast.expr]:
    """Yields what a statement assigns to a target: of a tuple, the value in its place."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult) and is_target(statement.target):
        yield statement.value
    if not isinstance(statement, ast.Assign):
        return
    for target in statement.targets:
        pairs = [(target, statement.value)]
        if isinstance(target, ast.Tuple):
            values = statement.value.elts if isinstance(statement.value, ast.Tuple) else []
            pairs = [*zip(target.elts, values)] if len(values) == len(target.elts) else []
        yield from (value for name, value in pairs if is_target(name))


def _all_assigned(source: Source, is_target: Callable[[ast.expr], bool]) -> list[ast.expr]:
    return [value for statement in source.statements for value in _assigned(statement, is_target)]


def _parts(tree: ast.AST | None, kind: type[N]) -> Iterator[N]:
    """Yields the nodes of a kind in a tree."""
    return (node for node in (ast.walk(tree) if tree else ()) if isinstance(node, kind))


def _returned(function: ast.AST) -> list[ast.expr]:
    """Returns what a function or a lambda may return."""
    if isinstance(function, ast.Lambda):
        return [function.body]
    return [part.value for part in _parts(function, ast.Return) if part.value is not None]


def _has_argument(function: ast.AST, product: ast.expr) -> bool:
    """Returns whether an argument of a function is a factor of a product."""
    arguments = {argument.arg for argument in _parts(function, ast.arg)}
    return not arguments.isdisjoint(ast.unparse(factor) for factor in _factors(product)[0])


def _given(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    names = [argument.arg for argument in function.args.args]
    return dict(zip(names, call.args)) | {word.arg: word.value for word in call.keywords if word.arg}


def _key(target: ast.AST) -> str:
    """Returns the key of `group["lr"]`; '' for anything else."""
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return str(target.slice.value)
    return ""


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _is_length(node: ast.AST) -> bool:
    """Returns whether an expression is the length of a loader."""
    if not isinstance(node, ast.Call) or _name(node.func) != "len" or len(node.args) != 1:
        return False
    return bool(LOADER.fullmatch(_name(node.args[0])))
