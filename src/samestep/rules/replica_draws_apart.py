from samestep.judge.places import FORWARD, SEEDS
from samestep.rules import Rule

RULE = Rule(
    en="the ranks along {axis} draw different random numbers in the forward pass of step {step}, and so compute different losses of the same rows: layers that each of them computes whole (dropout outside of the divided layers) need the same random numbers. Seed by the replica, not by the rank",
    zh="沿 {axis} 的各 rank 在第 {step} 步的前向传播中抽取不同的随机数，因此同样的数据行得到不同的损失：各 rank 完整计算的部分（切分层之外的 dropout）需要相同的随机数。请按副本而不是按 rank 设定种子",
    lines=(SEEDS, FORWARD),
    broken="""
torch.manual_seed(rank)
for x, y in loader:
    loss_of(model(x), y).backward()
""",
    right="""
torch.manual_seed(mesh["data"].get_local_rank())
for x, y in loader:
    loss_of(model(x), y).backward()
""",
)
