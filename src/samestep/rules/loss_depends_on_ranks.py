from samestep.judge.places import LOSS, MODES, OF_RANKS, TARGETS, called, flowing
from samestep.judge.source import RANK
from samestep.rules import Rule

RULE = Rule(
    en="the ranks' gradient is not that of one process on the same rows, though all ranks have the same number of rows and targets. The loss or the model depends on the rank, on the number of ranks, or on what else is in the batch (negatives of a contrastive loss, class weights, statistics, a term that balances experts)",
    zh="虽然各 rank 的行数和目标数相同，在相同的数据行上各 rank 的梯度却与单进程不同：损失或模型依赖于 rank、rank 的数量，或批次中的其他内容（对比损失的负样本、类别权重、统计量、均衡专家负载的项）",
    lines=(flowing(MODES, RANK), *OF_RANKS, TARGETS, called("collective"), *LOSS[3:]),
    broken="""
output, rebuilt = model(x)
first, second = F.cross_entropy(output, y), F.mse_loss(rebuilt, x)
loss = first + second * (first / second).detach()
loss.backward()
""",
    right="""
output, rebuilt = model(x)
first, second = F.cross_entropy(output, y), F.mse_loss(rebuilt, x)
sizes = torch.stack([first, second]).detach()
dist.all_reduce(sizes)
loss = first + second * sizes[0] / sizes[1]
loss.backward()
""",
)
