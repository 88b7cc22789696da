from samestep.judge.places import SEEDS, buffer
from samestep.rules import Rule

RULE = Rule(
    en="{buffer} is not the same on all ranks from the start: each rank fills this queue or buffer with its own random numbers. Broadcast it once, or use the same seed on all ranks",
    zh="{buffer} 从一开始在各 rank 上就不同：每个 rank 用自己的随机数填充了队列或缓冲区。请广播一次，或使用相同的种子",
    lines=(buffer, SEEDS),
    broken="""
torch.manual_seed(rank)
net.queue = torch.randn(128, 4096)
""",
    right="""
torch.manual_seed(rank)
net.queue = torch.randn(128, 4096)
dist.broadcast(net.queue, 0)
""",
)
