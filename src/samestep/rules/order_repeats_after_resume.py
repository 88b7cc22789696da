from samestep.rules import Rule

RULE = Rule(
    en="the epoch after the resumed one repeats its shuffled order: the script reads the resumed epoch through another loader (skip_first_batches), so the original loader does not count this epoch and shuffles the next one with the same seed. Tell the loader the epoch's number before each epoch: loader.iteration = epoch",
    zh="恢复训练的 epoch 之后，下一个 epoch 重复了它的打乱顺序：脚本通过另一个 loader（skip_first_batches）读取恢复的 epoch，原来的 DataLoader 没有计入它，于是用同一个种子打乱下一个 epoch。请在每个 epoch 之前把 epoch 编号告诉 DataLoader：loader.iteration = epoch",
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
