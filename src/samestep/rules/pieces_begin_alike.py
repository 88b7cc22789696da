from samestep.judge.places import SEEDS, parameter
from samestep.rules import Rule

RULE = Rule(
    en="the ranks along {axis} hold pieces of {parameter}, and all pieces begin with the same values: they are drawn from one seed, so that the layer is one piece repeated. Use another seed on each of these ranks, or cut one whole weight",
    zh="沿 {axis} 的各 rank 持有 {parameter} 的各一块，初始值却相同：都由同一个种子产生，整层只是同一块的重复；应在这些 rank 上使用不同的种子，或从一个完整权重切分",
    lines=(SEEDS, parameter),
    broken="""
torch.manual_seed(0)
columns = nn.Linear(16, 64 // ranks_of_a_layer)
""",
    right="""
torch.manual_seed(rank_in_the_layer)
columns = nn.Linear(16, 64 // ranks_of_a_layer)
""",
)
