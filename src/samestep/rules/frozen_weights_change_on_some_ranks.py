from __future__ import annotations

from samestep.judge.suggested_patches import Script, average_update, unwrap_test_of_rank
from samestep.rules import Rule


def average_on_all_ranks(script: Script) -> None:
    """Updates a moving average on all ranks in place of one."""
    if update := average_update(script):
        unwrap_test_of_rank(script, script.source.parent(update))


RULE = Rule(
    en="{network} ({weight}) is changed on {ranks:ranks} alone: this frozen network or moving average (teacher, key encoder, target, reference) is not updated on the other ranks, so that the ranks compute with different weights. Update it on all ranks, or broadcast it",
    zh="{network}（{weight}）只在 {ranks:ranks} 上被更新：冻结的网络或滑动平均（teacher、key encoder、target、reference）只在部分 rank 上更新，因此各 rank 使用不同的网络。请在所有 rank 上更新，或将其广播",
    patch=average_on_all_ranks,
    broken="""
def update(teacher, model):
    for kept, trained in zip(teacher.parameters(), model.parameters()):
        kept.data.lerp_(trained.data, 0.01)


for x, y in loader:
    loss_of(model(x), teacher(x)).backward()
    optimizer.step()
    if rank == 0:
        update(teacher, model)
""",
    right="""
def update(teacher, model):
    for kept, trained in zip(teacher.parameters(), model.parameters()):
        kept.data.lerp_(trained.data, 0.01)


for x, y in loader:
    loss_of(model(x), teacher(x)).backward()
    optimizer.step()
    update(teacher, model)
""",
)
