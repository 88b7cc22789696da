"""Faults of FSDP on a mesh: replicas of shards, and shards of tensor parallel layers, each on four ranks."""

from __future__ import annotations

from mutations.faults.fault import Fault
from mutations.faults.tensor import COLUMNS, UNREDUCED

FSDP, SPLIT, JOBS = "engines/fsdp.py", "parallel/tensor_parallel.py", ("heads",)
COPIES, DIVIDED = "data=2,shard=2", "shard=2,tensor=2"
GRADIENT, LOSS = ("first gradient",), ("loss",)
STEP = "                optimizer.step()\n"


def fault(name: str, file: str, old: str, new: str, named: tuple[str, ...], mesh: str) -> Fault:
    return Fault(f"fsdp: {name}", file, old, new, named, "", JOBS, engine="fsdp", mesh=mesh)


FAULTS = (
    fault(
        "replicas of shards are sharded, and never averaged",
        FSDP,
        'ranks["data", "shard"] if ranks["data"].size() > 1 else ranks["shard"]',
        'ranks["shard"]',
        GRADIENT,
        COPIES,
    ),
    fault(
        "each replica's shards have the gradient of its own rows in the last step",
        FSDP,
        "            model.set_requires_gradient_sync(batch.completes_step)\n",
        "            model.set_requires_gradient_sync(batch.completes_step)\n"
        "            model.set_requires_all_reduce(run.count.done < run.steps - 1)\n",
        ("first gradient", "parameter", "replicas", "loss"),
        COPIES,
    ),
    fault(
        "a copy of the shards leaves out its last update",
        FSDP,
        STEP,
        "                if world.rank < 2 or run.count.done < run.steps - 1:\n    " + STEP,
        ("replicas", "optimizer steps"),
        COPIES,
    ),
    fault(
        "sharded over ranks that have the same rows",
        "rank/process_group.py",
        '    return init_device_mesh(world.device.partition(":")[0], sizes, mesh_dim_names=axes)\n',
        '    names = tuple({"shard": "tensor", "tensor": "shard"}.get(axis, axis) for axis in axes)\n'
        '    return init_device_mesh(world.device.partition(":")[0], sizes, mesh_dim_names=names)\n',
        (*LOSS, *GRADIENT, "failed"),
        DIVIDED,
    ),
    fault(
        "the gradient of what is before a split layer is not reduced over the tensor ranks",
        SPLIT,
        COLUMNS,
        UNREDUCED,
        GRADIENT,
        DIVIDED,
    ),
    fault(
        "what is split is clipped by its own norm, and what is not by its own",
        SPLIT,
        "        for group in of_mesh.values():\n            clip_grads_with_norm_(group, max_norm, total)\n",
        "        for group, total in zip(of_mesh.values(), norms):\n"
        "            clip_grads_with_norm_(group, max_norm, total)\n",
        LOSS,
        DIVIDED,
    ),
    fault(
        "what is split over both axes counts once a tensor rank in the norm",
        SPLIT,
        "        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)\n",
        "        norms.append(norm.full_tensor() * norm.device_mesh.ndim**0.5)\n",
        LOSS,
        DIVIDED,
    ),
    fault(
        "dropout by ranks instead of replicas",
        "rank/step.py",
        "first = self._world.replica * len",
        "first = self._world.rank * len",
        LOSS,
        DIVIDED,
    ),
)
