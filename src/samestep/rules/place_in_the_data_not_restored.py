from samestep.rules import Rule

RULE = Rule(
    en="the rows are those of step {step} of the first run: the place in the data is not restored",
    zh="是第一次运行第 {step} 步的数据行：在数据中的位置没有恢复",
    broken="""
state = torch.load("checkpoint.pt")
place = rank * length
for step in range(state["step"], steps):
    train(tokens[place : place + length])
    place += world * length
""",
    right="""
state = torch.load("checkpoint.pt")
place = (state["step"] * world + rank) * length
for step in range(state["step"], steps):
    train(tokens[place : place + length])
    place += world * length
""",
)
