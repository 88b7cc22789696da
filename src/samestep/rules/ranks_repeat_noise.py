from samestep.rules import Rule

RULE = Rule(
    en="{ranks:ranks} draw the same random numbers for their rows between the loader and the model, from step {step} on: the generators have one state, so that noise or mixing repeats over the ranks. Seed them by rank after the model is built",
    zh="从第 {step} 步起，{ranks:ranks} 在 DataLoader 与模型之间为各自的样本抽取相同的随机数：随机数生成器状态相同，噪声或混合在各 rank 上重复。请在模型创建之后按 rank 设置种子",
    broken="""
torch.manual_seed(0)
model = DDP(Net())
for x, y in loader:
    loss_of(model(x + torch.randn_like(x)), y).backward()
""",
    right="""
torch.manual_seed(0)
model = DDP(Net())
torch.manual_seed(rank)
for x, y in loader:
    loss_of(model(x + torch.randn_like(x)), y).backward()
""",
)
