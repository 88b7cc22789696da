from samestep.rules import Rule

RULE = Rule(
    en="the gradients are clipped {clips:n time} after the optimizer's step, and cleared before the next step uses them: the clipping limits nothing. Clip between the backward pass and the step",
    zh="梯度在 optimizer.step() 之后才裁剪（共 {clips} 次），并在下一步使用之前就被清零：裁剪没有任何作用。请在 backward() 与 optimizer.step() 之间裁剪",
    broken="""
loss.backward()
optimizer.step()
clip_grad_norm_(model.parameters(), 1.0)
optimizer.zero_grad()
""",
    right="""
loss.backward()
clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
""",
)
