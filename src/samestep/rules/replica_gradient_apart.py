from samestep.judge.places import BACKWARD, DIVIDES, FORWARD, parameter, planned
from samestep.rules import Rule

RULE = Rule(
    en="{different:n parameter} {different:is|are} held whole by each rank along {axis}, but each rank takes the gradient of its own piece of the sequence or of the rows alone: nothing adds these gradients up over the ranks, so the copies come apart. Add them up before the step, as SequenceParallel does",
    zh="沿 {axis} 的每个 rank 都完整持有 {different} 个参数，却只用自己那一段序列或数据行的梯度来更新：没有在这些 rank 之间把梯度相加，各份参数会逐渐不同。请在更新之前相加（SequenceParallel 就是这样做的）",
    lines=(planned, parameter, DIVIDES, FORWARD, BACKWARD),
    broken="""
plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
block = parallelize_module(block, mesh["tensor"], plan)
""",
    right="""
plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
block = parallelize_module(block, mesh["tensor"], {"norm": SequenceParallel(), **plan})
""",
)
