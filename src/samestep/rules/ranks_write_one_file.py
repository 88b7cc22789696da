from __future__ import annotations

import ast

from samestep.judge.suggested_patches import RANK_NOW, Script
from samestep.rules import Rule


def save_on_rank_0(script: Script) -> None:
    """Lets rank 0 alone write a file."""
    statement = script.first("save")
    if isinstance(statement, ast.Expr) and script.edits.is_alone(statement):
        script.edits.indent(statement, f"if {RANK_NOW} == 0:")


RULE = Rule(
    en="{ranks:ranks} write the same file {file} (from step {step} on): afterwards the file holds one rank's data, or parts of several ranks' data. Let rank 0 save what all ranks have, under `if rank == 0`; each rank's own state needs a file of its own",
    zh="{ranks:ranks} 写同一个文件 {file}（从第 {step} 步起）：之后文件里是某一个 rank 的内容，或几个 rank 的片段。共有的内容请由 rank 0 保存（`if rank == 0`）；每个 rank 自己的状态需要自己的文件",
    patch=save_on_rank_0,
    broken="""
for epoch in range(3):
    train(model, epoch)
    torch.save(model.state_dict(), path)
""",
    right="""
for epoch in range(3):
    train(model, epoch)
    if torch.distributed.get_rank() == 0:
        torch.save(model.state_dict(), path)
""",
)
