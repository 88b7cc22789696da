from samestep.rules import Rule

RULE = Rule(
    en="a mean of means: a target in micro-batch {micro_batch} weighs {ratio:.4g} times one in micro-batch 0, because the micro-batches have different numbers of targets; divide the sums of losses by the number in all of the step's micro-batches",
    zh="平均的平均：micro-batch {micro_batch} 中一个目标的权重是 micro-batch 0 中的 {ratio:.4g} 倍，因为各 micro-batch 的目标数不同；请用损失之和除以这一步所有 micro-batch 的目标总数",
    broken="""
for x, y in micro_batches:
    loss = F.cross_entropy(model(x), y, ignore_index=-100)
    (loss / len(micro_batches)).backward()
""",
    right="""
targets = sum((y != -100).sum() for _, y in micro_batches)
for x, y in micro_batches:
    loss = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum")
    (loss / targets).backward()
""",
)
