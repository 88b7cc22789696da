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
        "rows_not_shared_out",
    ),
    Fault(
        "fabric_loop",
        "not divided",
        "targets) / MICRO)",
        "targets))",
        "loss weight",
        "loss_not_divided_by_accumulation",
    ),
    Fault(
        "fabric_loop", "never synced", "enabled=not last", "enabled=True", "gradient", "ranks_never_reduce_gradients"
    ),
    Fault(
        "fabric_loop",
        "rate by rank",
        "lr=0.1,",
        "lr=0.1 * (1 + fabric.global_rank),",
        "rate",
        "rates_differ_between_ranks",
    ),
    Fault(
        "horovod_loop",
        "optimizer not wrapped",
        "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())",
        "optimizer",
        "gradient",
        "ranks_never_reduce_gradients",
    ),
    Fault(
        "horovod_loop",
        "weights not broadcast",
        "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n",
        "",
        "initial weights",
        "ranks_begin_with_different_weights",
    ),
    Fault(
        "horovod_loop",
        "added up",
        "named_parameters=model.named_parameters()",
        "named_parameters=model.named_parameters(), op=hvd.Sum",
        "loss weight",
        "gradients_summed_over_ranks",
    ),
    Fault("horovod_loop", "set_epoch left out", EPOCH, "", "order", "set_epoch_never_called"),
    Fault(
        "horovod_loop",
        "rate times the ranks",
        "lr=0.05",
        "lr=0.05 * hvd.size()",
        "replayed rate",
        "rate_depends_on_ranks",
    ),
    *(
        fault
        for script in STAGES
        for fault in (
            Fault(
                script,
                "divided by hand, too",
                "engine.backward(loss)",
                "engine.backward(loss / engine.gradient_accumulation_steps())",
                "loss weight",
                "losses_divided_by_accumulation_twice",
            ),
            Fault(
                script,
                "loss times the ranks",
                "engine.backward(loss)",
                "engine.backward(loss * dist.get_world_size())",
                "loss weight",
                "loss_multiplied_by_ranks",
            ),
            Fault(script, "no sampler", "sampler=sampler", "shuffle=True", "rows", "rows_not_shared_out"),
            Fault(
                script,
                "rate by rank",
                "lr=0.01",
                "lr=0.01 * (1 + dist.get_rank())",
                "rate",
                "rates_differ_between_ranks",
            ),
        )
    ),
)
