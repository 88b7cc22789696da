from samestep.proof.script.places import DIVIDES, FORWARD, called, module_forward, parameter, planned
from samestep.rules import Rule

RULE = Rule(
    en="{module} is given what one process gives it, and returns something else on the {ranks} ranks along {axis}: what they compute in parts is not added up, is added up too often, or is of another part, or a factor or a mask in it is the rank's own",
    zh="{module} 的输入与一个进程的相同，在沿 {axis} 的 {ranks} 个 rank 上输出却不同：各部分没有相加、相加过多，或不是该有的部分，或其中的系数或掩码取决于 rank",
    lines=(module_forward, planned, DIVIDES, parameter, called("collective"), FORWARD),
    broken="""
class Rows(nn.Linear):
    def forward(self, x):
        return differentiable_all_reduce(F.linear(x, self.weight, self.bias))
""",
    right="""
class Rows(nn.Linear):
    def forward(self, x):
        return differentiable_all_reduce(F.linear(x, self.weight)) + self.bias
""",
)
