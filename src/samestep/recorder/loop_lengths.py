"""Finds the lengths of the loops around an optimizer's step, as far as their heads tell: `for epoch in range(epochs)`.

A head is read from the source, and evaluated with the values that its names have: numbers, attributes of plain objects,
and lengths of loaders and lists. No function of the user's is called, and no property of an object is asked.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from samestep.job.foreign import attributes_of, is_a
from samestep.recorder.call_sites import TORCH_AND_THIS
from samestep.records.script import LoopRecord
from samestep.world.imports import INSTALLED

DEEPEST = 60  # how many frames are looked at
WRAPPERS = ("enumerate", "tqdm", "trange", "track", "progress_bar", "log_every", "iter")
OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Div: lambda left, right: left / right,
}
LOOPS = (ast.For, ast.AsyncFor, ast.While)


class Unknown(Exception):
    """The head of a loop whose length is not known."""


def loops_around(frame: FrameType | None, is_users: Callable[[str], bool]) -> list[LoopRecord]:
    """Returns the loops around the user's line that is called in a frame, the innermost first; none where another
    library than torch calls that line, whose own loops are not known."""
    loops = list[LoopRecord]()
    for _ in range(DEEPEST):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if is_users(file):
            loops += _of_frame(frame, file)
            if frame.f_code.co_name == "<module>":
                break
        elif INSTALLED.search(file) and not file.startswith(TORCH_AND_THIS):
            return []
        frame = frame.f_back
    return loops


def _of_frame(frame: FrameType, file: str) -> list[LoopRecord]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return [LoopRecord(file, 0, None)]
    line, function = frame.f_lineno, frame.f_code.co_firstlineno
    around = [
        node
        for node in ast.walk(tree)
        if is_a(node, LOOPS)
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)
        and (node.lineno >= function or frame.f_code.co_name == "<module>")
    ]
    # A loop's variable has another value in its next round.
    counted = {name.id for loop in around for name in _names(getattr(loop, "target", None))}
    values = {**frame.f_globals, **frame.f_locals}
    values = {name: value for name, value in values.items() if name not in counted}
    return [LoopRecord(file, node.lineno, _length(node, values)) for node in sorted(around, key=lambda n: -n.lineno)]


def _names(tree: ast.AST | None) -> list[ast.Name]:
    return [node for node in ast.walk(tree) if is_a(node, ast.Name)] if tree else []


def _length(loop: ast.AST, values: dict[str, Any]) -> int | None:
    if not is_a(loop, ast.For):
        return None
    try:
        return _rounds(loop.iter, values)
    except (Unknown, ArithmeticError, TypeError, ValueError):
        return None


def _rounds(head: ast.expr, values: dict[str, Any]) -> int:
    """Returns how often a loop over an expression goes round."""
    if is_a(head, ast.Call):
        name = ast.unparse(head.func).rpartition(".")[2]
        if name in ("range", "trange"):
            return len(range(*(_value(argument, values) for argument in head.args)))
        if name in WRAPPERS and head.args:
            return _rounds(head.args[0], values)
        raise Unknown
    if is_a(head, ast.List | ast.Tuple) and not any(is_a(value, ast.Starred) for value in head.elts):
        return len(head.elts)
    return _size(_value(head, values))


def _value(node: ast.expr, values: dict[str, Any]) -> Any:
    """Returns the value of an expression of names, numbers and lengths."""
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name() if node.id in values:
            return values[node.id]
        case ast.Attribute():
            held = attributes_of(_value(node.value, values))
            if node.attr in held:
                return held[node.attr]
        case ast.BinOp() if type(node.op) in OPERATIONS:
            left, right = _value(node.left, values), _value(node.right, values)
            if is_a(left, int | float) and is_a(right, int | float):
                return OPERATIONS[type(node.op)](left, right)
        case ast.Call(func=ast.Name(id="len" | "int" as name), args=[argument]):
            value = _value(argument, values)
            return _size(value) if name == "len" else int(value)
    raise Unknown


def _size(value: Any) -> int:
    if is_a(value, list | tuple | range | DataLoader):
        return len(value)
    raise Unknown
