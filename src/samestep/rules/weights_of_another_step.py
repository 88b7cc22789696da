from samestep.rules import Rule

RULE = Rule(
    en="the weights are those after step {step}, not {expected}: another checkpoint was loaded, or --resumed-at is wrong",
    zh="权重是第 {step} 步之后的，而不是第 {expected} 步：检查点或 --resumed-at 不对",
    broken="""
checkpoints = Path("run").glob("step-*.pt")
model.load_state_dict(torch.load(sorted(checkpoints)[-1]))  # step-9.pt comes after step-10.pt
""",
    right="""
checkpoints = Path("run").glob("step-*.pt")
model.load_state_dict(torch.load(max(checkpoints, key=lambda path: int(path.stem.split("-")[1]))))
""",
)
