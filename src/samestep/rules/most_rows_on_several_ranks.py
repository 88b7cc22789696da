from samestep.rules import Rule

RULE = Rule(
    en="several ranks train most of the rows: the rows are not shared out",
    zh="大多数数据行被多个 rank 训练：数据没有分给各 rank",
    broken="""
for start in range(0, len(texts), 8):
    model(encode(texts[start : start + 8])).loss.backward()
""",
    right="""
for start in range(8 * rank, len(texts), 8 * world):
    model(encode(texts[start : start + 8])).loss.backward()
""",
)
