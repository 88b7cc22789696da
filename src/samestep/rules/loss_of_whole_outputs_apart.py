from samestep.judge.places import LOSS, called
from samestep.rules import Rule

RULE = Rule(
    en="each of the {ranks} ranks along {axis} has the model's whole output, as one process has it, but another loss: {found:.6g}, in one process {expected:.6g}. The loss takes the whole output for the rank's own part (of the vocabulary, of the sequence), or adds up over the ranks what each rank has whole",
    zh="沿 {axis} 的 {ranks} 个 rank 各自都有模型的完整输出，与单进程的相同，由它算出的损失却不同：{found:.6g}，单进程为 {expected:.6g}：损失把完整的输出当成了该 rank 自己的部分（词表或序列的一部分），或跨 rank 累加了每个 rank 都完整拥有的量",
    lines=(called("collective"), *LOSS),
    broken="""
plan = {"head": ColwiseParallel(output_layouts=Replicate())}
model = parallelize_module(Net(), mesh["tensor"], plan)
loss = vocabulary_parallel_loss(model(x), y)
loss.backward()
""",
    right="""
plan = {"head": ColwiseParallel(output_layouts=Shard(-1))}
model = parallelize_module(Net(), mesh["tensor"], plan)
loss = vocabulary_parallel_loss(model(x), y)
loss.backward()
""",
)
