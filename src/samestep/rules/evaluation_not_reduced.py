from samestep.rules import Rule

RULE = Rule(
    en="each rank evaluates other rows, and nothing combines their results before the training goes on: what the script prints, saves or decides is based on one rank's share. Add up the sums and the numbers of rows with all_reduce",
    zh="各 rank 评估不同的数据行，但在训练继续之前没有汇总结果：打印、保存或用于判断的只是一个 rank 的那一份；请用 all_reduce 把和与行数相加",
    broken="""
for x, y in test_loader:
    correct += (model(x).argmax(1) == y).sum()
    rows += len(y)
print(correct / rows)
""",
    right="""
for x, y in test_loader:
    correct += (model(x).argmax(1) == y).sum()
    rows += len(y)
totals = torch.tensor([correct, rows])
dist.all_reduce(totals)
print(totals[0] / totals[1])
""",
)
