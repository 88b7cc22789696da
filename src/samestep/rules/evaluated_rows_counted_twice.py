from __future__ import annotations

from samestep.judge.edits import call_in, keyword
from samestep.judge.places import evaluated
from samestep.judge.suggested_patches import RANK_NOW, RANKS_NOW, SUBSET, Script
from samestep.rules import Rule


def evaluate_each_row_once(script: Script) -> None:
    """Shares an evaluation out without padding."""
    call = call_in(script.only(evaluated("loader")), "DataLoader")
    sampler = keyword(call, "sampler") if call else None
    if call and call.args and sampler and not keyword(call, "shuffle"):
        data = script.edits.code(call.args[0])
        script.edits.replace(call.args[0], f"{SUBSET}({data}, range({RANK_NOW}, len({data}), {RANKS_NOW}))")
        script.edits.replace(sampler, "shuffle=False")


RULE = Rule(
    en="{twice} of {rows} evaluated rows {twice:is|are} counted twice: the sampler repeats rows to give each rank an equal share of the evaluation, and the sums over the ranks include the repeated rows, which cannot be left out of a sum again",
    zh="{rows} 个评估的数据行中有 {twice} 行被计算了两次：采样器把评估填充到各 rank 等长，随后把各 rank 的和相加，重复的行无法再去除",
    lines=(evaluated("loader"), evaluated("collective")),
    patch=evaluate_each_row_once,
    broken="""
val_loader = DataLoader(val, sampler=DistributedSampler(val))
""",
    right="""
val_loader = DataLoader(torch.utils.data.Subset(val, range(torch.distributed.get_rank(), len(val), torch.distributed.get_world_size())), shuffle=False)
""",
)
