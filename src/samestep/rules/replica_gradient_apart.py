from samestep.proof.script.places import BACKWARD, DIVIDES, FORWARD, parameter, planned
from samestep.rules import Rule

RULE = Rule(
    en="the ranks along {axis} each hold the whole of {different:n parameter}, and take another gradient of it: each that of its own piece of the sequence or of the rows, and nothing adds these up (as SequenceParallel does)",
    zh="沿 {axis} 的各 rank 各自完整持有 {different} 个参数，所用的梯度却不同：各是自己那一段序列或数据行的梯度，没有相加（SequenceParallel 会相加）",
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
