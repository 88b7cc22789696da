from samestep.judge.places import READS, REDUCTION, STEP, called
from samestep.rules import Rule

RULE = Rule(
    en="the first gradient is that of one process, but the optimizer, which reduces the gradients itself, takes another step with it: it adds the gradients up over the ranks and does not divide by their number, or another part of the step depends on the number of ranks",
    zh="第一个梯度与单进程相同，而自己归约梯度的优化器由此走出了不同的一步：梯度在各 rank 上相加却没有除以 rank 数，或该步的其他部分依赖于 rank 的数量",
    lines=(REDUCTION, READS, called("collective"), STEP),
    broken="""
class ReducingSGD(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
        super().step()
""",
    right="""
class ReducingSGD(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= world
        super().step()
""",
)
