from samestep.rules import Rule

RULE = Rule(
    en="each of the {ranks} ranks evaluates all {rows:n row}, and their results are added up: each row counts {ranks} times, which is right only if the sum is divided by that number. Share the rows out, or leave out the sum",
    zh="{ranks} 个 rank 各自评估全部 {rows} 行，并把结果相加：每行被计算 {ranks} 次，只有再除以同样的倍数时才正确；请把数据分给各 rank，或者不要相加",
    broken="""
for x, y in DataLoader(test, batch_size=8):
    correct += (model(x).argmax(1) == y).sum()
dist.all_reduce(correct)
print(correct / len(test))
""",
    right="""
for x, y in DataLoader(test, batch_size=8):
    correct += (model(x).argmax(1) == y).sum()
print(correct / len(test))
""",
)
