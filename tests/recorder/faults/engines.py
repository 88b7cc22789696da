"""Faults of scripts whose gradients a library's engine reduces: DeepSpeed, Horovod, Lightning Fabric."""

from __future__ import annotations

from recorder.faults.fault import Fault

EPOCH = "        sampler.set_epoch(epoch)\n"
FABRIC = "fabric.setup(module, torch.optim"
STAGES = tuple(f"deepspeed_engine {stage}" for stage in range(4))
FAULTS = (
    Fault(
        "fabric_loop",
        "loader not set up",
        "fabric.setup_dataloaders(DataLoader(",
        "(DataLoader(",
        "rows",
        "reads every row",
    ),
    Fault("fabric_loop", "not divided", "targets) / MICRO)", "targets))", "loss weight", "not divided by 3"),
    Fault("fabric_loop", "never synced", "enabled=not last", "enabled=True", "gradient", "never reduced"),
    Fault("fabric_loop", "rate by rank", "lr=0.1,", "lr=0.1 * (1 + fabric.global_rank),", "rate", "different rates"),
    Fault(
        "horovod_loop",
        "optimizer not wrapped",
        "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())",
        "optimizer",
        "gradient",
        "never reduced",
    ),
    Fault(
        "horovod_loop",
        "weights not broadcast",
        "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n",
        "",
        "initial weights",
        "common seed",
    ),
    Fault(
        "horovod_loop",
        "added up",
        "named_parameters=model.named_parameters()",
        "named_parameters=model.named_parameters(), op=hvd.Sum",
        "loss weight",
        "added up over the 2 ranks",
    ),
    Fault("horovod_loop", "set_epoch left out", EPOCH, "", "order", "never called"),
    Fault(
        "horovod_loop",
        "rate times the ranks",
        "lr=0.05",
        "lr=0.05 * hvd.size()",
        "replayed rate",
        "depends on the number of ranks",
    ),
    *(
        fault
        for script in STAGES
        for fault in (
            Fault(
                script,
                "divided by hand, too",
                "engine.backward(loss)",
                "engine.backward(loss / 3)",
                "loss weight",
                "twice",
            ),
            Fault(
                script,
                "loss times the ranks",
                "engine.backward(loss)",
                "engine.backward(loss * dist.get_world_size())",
                "loss weight",
                "multiplied by the 2 ranks",
            ),
            Fault(script, "no sampler", "sampler=sampler", "shuffle=True", "rows", "reads every row"),
            Fault(script, "rate by rank", "lr=0.01", "lr=0.01 * (1 + dist.get_rank())", "rate", "different rates"),
        )
    ),
)
