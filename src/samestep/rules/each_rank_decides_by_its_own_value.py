from samestep.rules import Rule

RULE = Rule(
    en="each rank has its own value of an evaluation ({values}), by which a schedule, early stopping or the choice of the best checkpoint decides: the ranks may decide otherwise. Reduce the value over the ranks (in Lightning: self.log(…, sync_dist=True))",
    zh="每个 rank 有自己的评估值（{values}），学习率调度、提前停止或最佳 checkpoint 的选择据此决定：各 rank 的决定可能不同。请在各 rank 间归约该值（Lightning 中：self.log(…, sync_dist=True)）",
    broken="""
val_loss = evaluate(model, val_loader)
plateau.step(val_loss)
""",
    right="""
val_loss = torch.tensor(evaluate(model, val_loader))
dist.all_reduce(val_loss)
plateau.step(val_loss / dist.get_world_size())
""",
)
