from __future__ import annotations

import ast

from samestep.judge.edits import argument_of, call_in, is_of_gradients
from samestep.judge.places import BACKWARD, OF_GRADIENTS, REDUCTION, WAITS
from samestep.judge.source_search import calls
from samestep.judge.suggested_patches import RANKS_NOW, Script
from samestep.rules import Rule


def divide_gradients_by_ranks(script: Script) -> None:
    """Divides gradients that are added up over the ranks by their number."""
    calls = [(statement, call) for statement in script.shared() if (call := call_in(statement, "all_reduce"))]
    # A sum that is printed is no gradient.
    of_gradients = [
        (statement, call, tensor)
        for statement, call in calls
        if (tensor := argument_of(call, "tensor", 0)) and is_of_gradients(tensor, statement, script.source)
    ]
    # Along one of several axes it may be right to add gradients up.
    if len(of_gradients) != 1:
        return
    ((statement, call, tensor),) = of_gradients
    group, is_async = argument_of(call, "group", 2), argument_of(call, "async_op", 3)
    reduced = script.edits.code(tensor)
    ranks = RANKS_NOW.replace("()", f"({script.edits.code(group) if group else ''})")
    if is_async and ast.unparse(is_async) != "False":
        _divide_after_wait(script, reduced, ranks)
    elif isinstance(statement, ast.Expr):
        script.edits.insert_after(statement, f"{reduced} /= {ranks}")


def _divide_after_wait(script: Script, reduced: str, ranks: str) -> None:
    for line in calls(script.source, "wait"):
        statement = script.source.statement(line)
        loops = [script.source.loop_at(number) for number in script.source.loops(line)]
        if statement and loops and isinstance(loops[0], ast.For) and isinstance(statement, ast.Expr):
            names = {node.id for node in ast.walk(loops[0].target) if isinstance(node, ast.Name)}
            if reduced.partition(".")[0] in names and script.source.parent(statement) is loops[0]:
                script.edits.insert_after(statement, f"{reduced} /= {ranks}")
                return


RULE = Rule(
    en="the gradients are added up over the {ranks:n rank}, and not divided by their number",
    zh="梯度在 {ranks} 个 rank 上相加，却没有除以 rank 数",
    lines=(
        REDUCTION,
        WAITS,
        OF_GRADIENTS,
        BACKWARD,
    ),
    patch=divide_gradients_by_ranks,
    broken="""
for p in model.parameters():
    dist.all_reduce(p.grad)
""",
    right="""
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= torch.distributed.get_world_size()
""",
)
