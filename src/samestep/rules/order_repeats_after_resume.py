from samestep.rules import Rule

RULE = Rule(
    en="the epoch after the resumed one has its order again: the loader does not know that one has ended",
    zh="恢复训练之后的下一个 epoch 重复了它的顺序：DataLoader 不知道前一个 epoch 已经结束",
    broken="""
for epoch in range(first_epoch, epochs):
    batches = accelerator.skip_first_batches(loader, done) if epoch == first_epoch else loader
    for x, y in batches:
        train(x, y)
""",
    right="""
for epoch in range(first_epoch, epochs):
    batches = accelerator.skip_first_batches(loader, done) if epoch == first_epoch else loader
    loader.iteration = epoch
    for x, y in batches:
        train(x, y)
""",
)
