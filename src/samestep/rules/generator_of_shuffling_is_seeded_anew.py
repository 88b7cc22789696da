from samestep.judge.places import called
from samestep.rules import Rule

RULE = Rule(
    en="each epoch has the same shuffled order, in one process too: the loader's generator begins with the same seed each time",
    zh="每个 epoch 的打乱顺序都相同（单进程训练也会如此）：DataLoader 的 generator 每次都以同一个种子开始",
    lines=(called("loader"),),
    broken="""
for epoch in range(3):
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(data, shuffle=True, generator=generator)
    for x, y in loader:
        train(x, y)
""",
    right="""
generator = torch.Generator().manual_seed(0)
for epoch in range(3):
    loader = DataLoader(data, shuffle=True, generator=generator)
    for x, y in loader:
        train(x, y)
""",
)
