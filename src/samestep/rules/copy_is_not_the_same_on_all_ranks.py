from samestep.rules import Rule

RULE = Rule(
    en="{cause}. No forward pass of the copy was seen: if one rank alone uses the copy, this may be intended",
    zh="{cause}。没有看到它的前向：如果只有一个 rank 使用它，这可能是有意的",
    broken="""
average = AveragedModel(net)
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    if rank == 0:
        average.update_parameters(net)
evaluate(average)
""",
    right="""
average = AveragedModel(net)
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    average.update_parameters(net)
evaluate(average)
""",
)
