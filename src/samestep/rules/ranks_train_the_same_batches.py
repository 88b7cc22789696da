from samestep.judge.places import SEEDS, SHARING
from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} trains the same batches as rank 0, row for row, in the same step or in a step beside it: the same seed chooses the rows on both, or the rows are not shared out",
    zh="rank {rank} 与 rank 0 在同一步或相邻的步里训练逐行相同的 batch：两者用同一个种子选取样本，或样本没有按 rank 划分",
    lines=(SEEDS, *SHARING),
    broken="""
torch.manual_seed(1337)
for step in range(steps):
    places = torch.randint(len(tokens) - length, (8,))
    x = torch.stack([tokens[place : place + length] for place in places])
    model(x).loss.backward()
""",
    right="""
torch.manual_seed(1337 + rank)
for step in range(steps):
    places = torch.randint(len(tokens) - length, (8,))
    x = torch.stack([tokens[place : place + length] for place in places])
    model(x).loss.backward()
""",
)
