from samestep.judge.places import OF_WEIGHTS, parameter, tied
from samestep.rules import Rule

RULE = Rule(
    en="{embedding} and {head} begin with the same values and are trained apart: weights that were tied (shared) have become two parameters, for example because one of them was replaced, copied or loaded afterwards. Tie them again before the model is wrapped",
    zh="{embedding} 与 {head} 初始值相同，却分别训练：原本共享（tied）的权重成了两个参数，例如在共享之后替换、复制或加载了其中一个。请在包装模型之前重新共享",
    lines=(tied, OF_WEIGHTS, parameter),
    broken="""
model.head.weight = model.embedding.weight
model.embedding = nn.Embedding(5000, 64)
model = DDP(model)
""",
    right="""
model.embedding = nn.Embedding(5000, 64)
model.head.weight = model.embedding.weight
model = DDP(model)
""",
)
