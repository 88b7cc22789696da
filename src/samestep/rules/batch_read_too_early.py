from samestep.rules import Rule

RULE = Rule(
    en="the rows of step {step} are read one batch too early: a batch is left out",
    zh="差一个批次：过早读取了第 {step} 步的数据行，漏掉了一个批次",
    broken="""
done = torch.load("checkpoint.pt")["done"]
for i, (x, y) in enumerate(loader):
    if i <= done:
        continue
    train(x, y)
    torch.save({"model": model.state_dict(), "done": i + 1}, "checkpoint.pt")
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
