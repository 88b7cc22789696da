from samestep.rules import Rule

RULE = Rule(
    en="`{condition}` never holds: the remainder of a division by N is less than N. The code below it never runs (a moving average is never updated, a step never taken); compare with 0, or with N - 1",
    zh="`{condition}` 永远不成立：除以 N 的余数小于 N，其下的代码从不执行（例如滑动平均从未更新，某一步从未执行）；请与 0 或 N - 1 比较",
    broken="""
if (step + 1) % accumulate == accumulate:
    optimizer.step()
""",
    right="""
if (step + 1) % accumulate == 0:
    optimizer.step()
""",
)
