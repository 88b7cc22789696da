from samestep.rules import Rule

RULE = Rule(
    en="{network} ({weight}) begins with the same weights on all ranks, and each rank changes them to other values: this frozen network or moving average follows each rank's own rows or random numbers, so that the ranks compute with different weights",
    zh="{network}（{weight}）在各 rank 上从相同的权重变为不同的值：冻结的网络或滑动平均跟随了各 rank 自己的数据行或随机数，因此各 rank 使用不同的网络",
    broken="""
features = model(x)
loss_of(features, prototypes(y)).backward()
means = means_by_class(features.detach(), y)
prototypes.weight.data.lerp_(means, 0.1)
""",
    right="""
features = model(x)
loss_of(features, prototypes(y)).backward()
means = means_by_class(features.detach(), y) / world
dist.all_reduce(means)
prototypes.weight.data.lerp_(means, 0.1)
""",
)
