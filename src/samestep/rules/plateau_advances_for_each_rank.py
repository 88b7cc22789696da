from samestep.rules import Rule

RULE = Rule(
    en="ReduceLROnPlateau is given each value {ranks} times, once for each rank: values without improvement are counted so many times as often, and the rate falls early. Do not prepare this schedule (accelerator.prepare), and step it once for each evaluation",
    zh="ReduceLROnPlateau 对每个值收到 {ranks} 次，每个 rank 一次：没有改进的次数被成倍计算，学习率会过早下降。不要对该调度器调用 accelerator.prepare，每次评估只 step 一次",
    broken="""
plateau = accelerator.prepare(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
plateau.step(val_loss)
""",
    right="""
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
plateau.step(val_loss)
""",
)
