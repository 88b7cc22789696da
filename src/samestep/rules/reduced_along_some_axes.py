from samestep.judge.places import DIVIDES, OF_GRADIENTS, REDUCTION
from samestep.rules import Rule

RULE = Rule(
    en="the gradients are the mean over {ranks:ranks}, along {axis}, and not over all {replicas} replicas: nothing reduces them along the other axes of the mesh",
    zh="梯度只是 {ranks:ranks}（沿 {axis}）的平均，而不是全部 {replicas} 个副本的平均：没有沿网格的其他轴归约",
    lines=(DIVIDES, REDUCTION, OF_GRADIENTS),
    broken="""
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
for layer in model.layers:
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
""",
    right="""
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
""",
)
