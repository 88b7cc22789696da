from samestep.judge.places import BACKWARD, FORWARD, called, parameter
from samestep.rules import Rule

RULE = Rule(
    en="the {ranks} ranks along {axis} compute another gradient than one process does for the same rows and weights[[ ({replicas:n replica})]]",
    zh="沿 {axis} 的 {ranks} 个 rank 对相同的数据行和权重算出与一个进程不同的梯度[[（{replicas} 个副本）]]",
    lines=(called("collective"), parameter, FORWARD, BACKWARD),
    broken="""
columns = nn.Linear(16, 64 // ranks_of_a_layer)
loss_of(rows(columns(x)), y).backward()
for p in columns.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world
""",
    right="""
columns = nn.Linear(16, 64 // ranks_of_a_layer)
loss_of(rows(columns(x)), y).backward()
for p in columns.parameters():
    dist.all_reduce(p.grad, group=same_columns)
    p.grad /= dist.get_world_size(same_columns)
""",
)
