from samestep.rules import Rule

RULE = Rule(
    en="rank {rank} takes fewer optimizer steps than the others: its loader has fewer batches, or a condition on its own data skips steps",
    zh="rank {rank} 的优化器步数比其他 rank 少：它的 DataLoader 批次较少，或者某个依赖自身数据的条件跳过了一些步",
    broken="""
files = sorted(Path("data").glob("*.pt"))
for file in files[rank::world]:
    for x, y in DataLoader(Rows(file), batch_size=8):
        train(x, y)
""",
    right="""
files = sorted(Path("data").glob("*.pt"))
files = files[: len(files) // world * world]
for file in files[rank::world]:
    for x, y in DataLoader(Rows(file), batch_size=8):
        train(x, y)
""",
)
