from samestep.judge.places import called, into
from samestep.rules import Rule

RULE = Rule(
    en="{still:.0%} of the elements of the 16-bit weights with a gradient never move in {steps:n step} at a rate of {rate:.2g}: their updates are smaller than half of an element's last bit, and are rounded away. Keep the weights in float32 under autocast, or use an optimizer with float32 master weights",
    zh="在学习率 {rate:.2g} 下，有梯度的 16 位权重中有 {still:.0%} 的元素在 {steps} 步中从未变化：更新量小于元素末位的一半，被舍入丢弃。请用 autocast 并以 float32 保存权重，或使用带 float32 主权重的优化器",
    lines=(called("optimizer"), into(called("optimizer"))),
    broken="""
model = Net().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
loss_of(model(x), y).backward()
""",
    right="""
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
with torch.autocast("cpu", torch.bfloat16):
    loss = loss_of(model(x), y)
loss.backward()
""",
)
