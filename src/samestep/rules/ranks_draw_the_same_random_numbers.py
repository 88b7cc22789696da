from __future__ import annotations

from samestep.judge.edits import call_in
from samestep.judge.places import SEEDS
from samestep.judge.suggested_patches import RANK_NOW, Script
from samestep.rules import Rule


def seed_by_rank(script: Script) -> None:
    """Seeds each rank otherwise once the model is made and wrapped: all ranks begin with the same weights."""
    wrapper, seeds = script.first("wrapper"), script.statements("seed")
    if wrapper is None or not seeds:
        return
    call = call_in(seeds[-1], "manual_seed")
    if call and len(call.args) == 1 and seeds[-1].lineno > wrapper.lineno:
        script.edits.replace(call.args[0], f"{script.edits.code(call.args[0])} + {RANK_NOW}")
    else:
        script.edits.insert_after(wrapper, f"torch.manual_seed(torch.initial_seed() + {RANK_NOW})")


RULE = Rule(
    en="every rank draws the same random numbers in the model (dropout masks, noise): the generators have one state on {ranks:ranks} from step {step} on. The mean over the ranks is not wrong by nature, but the ranks' noise is not independent: seed by rank after the model is built, and restore each rank's own state on resume[[; {workers}]]",
    zh="各 rank 在模型中抽取相同的随机数（dropout 掩码、噪声）：从第 {step} 步起，{ranks:ranks} 的随机数生成器状态相同。平均值不会因此出错，但各 rank 的噪声不独立：请在模型创建之后按 rank 设置种子，恢复训练时恢复每个 rank 自己的状态[[；{workers}]]",
    lines=(SEEDS,),
    patch=seed_by_rank,
    broken="""
torch.manual_seed(1)
model = DDP(net)
torch.manual_seed(7)
""",
    right="""
torch.manual_seed(1)
model = DDP(net)
torch.manual_seed(7 + torch.distributed.get_rank())
""",
)
