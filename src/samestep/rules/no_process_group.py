from samestep.judge.places import FORWARD, written
from samestep.judge.source_search import calls
from samestep.rules import Rule

RULE = Rule(
    en="no rank opens a process group: each of the {ranks} processes trains a model of its own, as one process does. Call torch.distributed.init_process_group(), and see that the script looks for the variables that the launcher sets (torchrun: RANK, WORLD_SIZE, LOCAL_RANK)",
    zh="没有任何 rank 建立进程组：{ranks} 个进程各自训练自己的模型，与单进程相同。请调用 torch.distributed.init_process_group()，并确认脚本读取的是启动器所设置的环境变量（torchrun：RANK、WORLD_SIZE、LOCAL_RANK）",
    lines=(written(lambda source: calls(source, "init_process_group")), FORWARD),
    broken="""
dist.init_process_group("gloo") if "SLURM_PROCID" in os.environ else None
""",
    right="""
dist.init_process_group("gloo")
""",
)
