from __future__ import annotations

from samestep.judge.edits import call_in, keyword
from samestep.judge.places import evaluated
from samestep.judge.suggested_patches import Script
from samestep.rules import Rule


def evaluate_the_last_batch(script: Script) -> None:
    """Keeps the last batch of an evaluation."""
    call = call_in(script.only(evaluated("loader")), "DataLoader")
    drop_last = keyword(call, "drop_last") if call else None
    if call and drop_last:
        script.edits.replace(drop_last.value, "False")


RULE = Rule(
    en="{missing} of {rows:n row} are evaluated by no rank: the rows are shared out among more ranks than evaluate, or are shared out twice",
    zh="{rows} 行中有 {missing} 行没有任何 rank 评估：参与评估的 rank 少于分配数据的 rank，或者数据被分了两次",
    lines=(evaluated("loader"), evaluated("sampler")),
    patch=evaluate_the_last_batch,
    broken="""
val_loader = DataLoader(val, drop_last=True)
""",
    right="""
val_loader = DataLoader(val, drop_last=False)
""",
)
