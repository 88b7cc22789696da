from samestep.judge.places import SEEDS, called
from samestep.rules import Rule

RULE = Rule(
    en="the datasets of {ranks:ranks} draw the same random numbers, so that noise or augmentation repeats over the ranks. Seed them by rank (and worker)",
    zh="{ranks:ranks} 的数据集抽取相同的随机数，噪声或数据增强在各 rank 上重复。请按 rank（和 worker）设置种子",
    lines=(SEEDS, called("loader")),
    broken="""
class Noisy(Dataset):
    def __init__(self, rows):
        self.rows, self.random = rows, numpy.random.default_rng(0)

    def __getitem__(self, index):
        return self.rows[index] + self.random.normal()
""",
    right="""
class Noisy(Dataset):
    def __init__(self, rows):
        self.rows, self.random = rows, numpy.random.default_rng([0, rank])

    def __getitem__(self, index):
        return self.rows[index] + self.random.normal()
""",
)
