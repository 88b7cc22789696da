"""Reported in https://github.com/sktime/pytorch-forecasting/issues/2293: hash() numbers groups, differently on each rank."""

from __future__ import annotations

import ast

from samestep.judge.edits import call_in
from samestep.judge.places import called, written
from samestep.judge.source import Source
from samestep.judge.source_search import calls
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule

OF_ANY_ORDER = ("set", "hash", "listdir", "iterdir", "glob")  # functions whose result is another one in each process
LISTS = ("list", "tuple", "enumerate")  # functions that keep the order of what they are given


def numbers_of_any_order(source: Source) -> list[int]:
    """Returns the lines that call a function whose order or number is another one in each process."""
    return [line for name in OF_ANY_ORDER for line in calls(source, name)]


def sort_the_set(script: Script) -> None:
    """Sorts the one set that is listed or numbered: sorted strings have one order in all processes."""
    numbered = [
        (node, node.args[0])
        for statement in script.shared()
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in LISTS and node.args
        if isinstance(node.args[0], ast.Call) and call_in(node.args[0], "set") is node.args[0]
    ]
    if len(numbered) == 1:
        call, made = numbered[0]
        if ast.unparse(call.func) == "list":
            script.edits.replace(call.func, "sorted")
        else:
            script.edits.replace(made, f"sorted({script.edits.code(made)})")


RULE = Rule(
    en="the ranks read the same rows, but number their {classes} classes differently: the numbers come from the order of a set, from hash() or from a folder's order, which is not the same in each process. Sort before you number",
    zh="各 rank 读取同样的数据行，但给 {classes} 个类别的编号不同：编号来自集合的顺序、hash() 或文件夹的顺序，而这些在每个进程中各不相同。请先排序再编号",
    lines=(written(numbers_of_any_order), called("loader")),
    patch=sort_the_set,
    broken="""
classes = list(set(names))
number_of = {name: number for number, name in enumerate(classes)}
""",
    right="""
classes = sorted(set(names))
number_of = {name: number for number, name in enumerate(classes)}
""",
)
