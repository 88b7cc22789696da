from samestep.judge.places import FORWARD, module_forward
from samestep.rules import Rule

RULE = Rule(
    en="{module} gets the same input on the ranks together as in one process, but returns something else: it depends on the rank, on the number of ranks, or on what else is in a rank's batch",
    zh="各 rank 合起来给 {module} 的输入与单进程的相同，它的输出却不同：它依赖于 rank、rank 的数量，或某个 rank 批次中的其他内容",
    lines=(module_forward, FORWARD),
    broken="""
class Centred(nn.Module):
    def forward(self, x):
        features = self.model(x)
        return features - features.mean(0)
""",
    right="""
class Centred(nn.Module):
    def forward(self, x):
        features = self.model(x)
        return features - torch.distributed.nn.functional.all_reduce(features.mean(0)) / world
""",
)
