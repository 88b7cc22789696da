from samestep.rules import Rule

RULE = Rule(
    en="the losses are divided by the {micro_batches:n micro-batch} twice",
    zh="损失两次除以了 {micro_batches} 个 micro-batch",
    broken="""
accelerator = Accelerator(gradient_accumulation_steps=4)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model(x), y) / 4)
""",
    right="""
accelerator = Accelerator(gradient_accumulation_steps=4)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model(x), y))
""",
)
