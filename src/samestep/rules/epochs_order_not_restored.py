from samestep.rules import Rule

RULE = Rule(
    en="no recorded step of the first run trains these rows together: the epoch's order, which its seed, epoch or random state decides, is not restored",
    zh="第一次运行在任何记录的步中都没有一起训练过这些数据行：由种子、epoch 或随机状态决定的 epoch 顺序没有恢复",
    broken="""
seed = torch.tensor(random.randrange(2**31))
dist.broadcast(seed, 0)
sampler = DistributedSampler(data, seed=int(seed))
if resumed:
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
""",
    right="""
seed = torch.tensor(random.randrange(2**31))
dist.broadcast(seed, 0)
sampler = DistributedSampler(data, seed=int(seed))
if resumed:
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    sampler.seed = state["seed"]
""",
)
