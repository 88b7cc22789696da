from samestep.judge.places import DIVIDES, FORWARD, called, module_forward, parameter, planned
from samestep.rules import Rule

RULE = Rule(
    en="{module} gets the same input as in one process, but returns something else on the {ranks} ranks along {axis}: the results of the ranks' parts are not added up, are added up too often, or belong to another part, or a factor or a mask in the module is the rank's own",
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
