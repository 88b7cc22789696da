from __future__ import annotations

import ast

from samestep.judge.edits import call_in, keyword
from samestep.judge.places import SEEDS, called
from samestep.judge.suggested_patches import SAMPLER, Script, insert_set_epoch
from samestep.rules import Rule


def share_rows(script: Script) -> None:
    """Gives the loader a DistributedSampler, which set_epoch shuffles anew in each epoch."""
    statement = script.first("loader")
    call = call_in(statement, "DataLoader")
    if statement is None or call is None or not call.args or keyword(call, "batch_sampler"):
        return
    shuffle, sampler = keyword(call, "shuffle"), keyword(call, "sampler")
    data = script.edits.code(call.args[0])
    drawn = script.edits.code(shuffle.value) if shuffle else "False"
    made = _sampler_of(script, data) or f"{SAMPLER}({data}, shuffle={drawn})"
    place = sampler or shuffle
    if place:
        script.edits.replace(place, f"sampler={made}")
    else:
        script.edits.replace(call.args[0], f"{data}, sampler={made}")
    if sampler and shuffle:
        return
    loader = script.name_of(statement)
    if drawn == "True" and loader and "set_epoch" not in script.source.text:
        insert_set_epoch(script, f"{loader}.sampler")


def _sampler_of(script: Script, data: str) -> str:
    """Returns the name of a DistributedSampler of a dataset that the script makes already; '' where it has none."""
    for statement in script.source.statements:
        call = call_in(statement, "DistributedSampler") if isinstance(statement, ast.Assign) else None
        if call and call.args and script.edits.code(call.args[0]) == data and not keyword(call, "rank"):
            return script.name_of(statement)
    return ""


RULE = Rule(
    en="each rank reads every row: nothing shares the rows out (DistributedSampler, or the library's preparation of the loader), so the ranks train the same epoch",
    zh="每个 rank 都读取全部数据行：没有把数据分给各 rank（DistributedSampler，或库对 DataLoader 的 prepare），于是各 rank 训练同一个 epoch",
    lines=(called("loader"), called("sampler"), SEEDS),
    patch=share_rows,
    broken="""
loader = DataLoader(data, batch_size=4, shuffle=True)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        loss.backward()
""",
    right="""
loader = DataLoader(data, batch_size=4, sampler=torch.utils.data.distributed.DistributedSampler(data, shuffle=True))
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        loss.backward()
""",
)
