from samestep.rules import Rule

RULE = Rule(
    en="the rows of step {step} are trained again: off by one batch",
    zh="差一个批次：再次训练了第 {step} 步的数据行",
    broken="""
done = torch.load("checkpoint.pt")["done"]
for i, (x, y) in enumerate(loader):
    if i < done:
        continue
    train(x, y)
    torch.save({"model": model.state_dict(), "done": i}, "checkpoint.pt")
""",
    right="""
done = torch.load("checkpoint.pt")["done"]
for i, (x, y) in enumerate(loader):
    if i < done:
        continue
    train(x, y)
    torch.save({"model": model.state_dict(), "done": i + 1}, "checkpoint.pt")
""",
)
