from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} ended after {steps:n step}: {how}; {others:ranks} began the next step, whose collectives wait for rank {rank}. Let the exception end the rank, so that its launcher ends the others, or mend what it says",
    zh="rank {rank} 在 {steps} 步之后结束：{how}；{others:ranks} 开始了下一步，其集合通信在等待 rank {rank}。请让该异常结束这个 rank，使启动器结束其他 rank，或修正异常所说的问题",
    broken="""
try:
    batch = torch.load(f"rows-{rank}.pt")
except OSError:
    sys.exit(0)
""",
    right="""
batch = torch.load(f"rows-{rank}.pt")
""",
)
