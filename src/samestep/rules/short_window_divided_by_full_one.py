from samestep.rules import Rule

RULE = Rule(
    en="the last window has {micro_batches} micro-batches of {most}, and is divided by {most}: the step is too small",
    zh="最后一个累积窗口只有 {most} 个中的 {micro_batches} 个 micro-batch，却除以了 {most}：这一步太小",
    broken="""
for i, (x, y) in enumerate(loader):
    (loss_of(model(x), y) / 4).backward()
    if i % 4 == 3 or i == len(loader) - 1:
        optimizer.step()
        optimizer.zero_grad()
""",
    right="""
for i, (x, y) in enumerate(loader):
    window = min(4, len(loader) - i // 4 * 4)
    (loss_of(model(x), y) / window).backward()
    if i % 4 == 3 or i == len(loader) - 1:
        optimizer.step()
        optimizer.zero_grad()
""",
)
