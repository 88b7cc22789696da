"""Faults of scripts whose parameters or optimizer are sharded."""

from __future__ import annotations

from recorder.faults.fault import Fault


def of_rows_and_losses(script: str) -> list[Fault]:
    """Returns the faults that the scripts of FSDP's two versions have in the same words."""
    return [
        Fault(
            script,
            "no sampler",
            "batch_size=5, sampler=sampler",
            "batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(5)",
            "rows",
            "rows_not_shared_out",
        ),
        Fault(
            script,
            "not divided",
            "(loss / 3).backward()",
            "loss.backward()",
            "loss weight",
            "loss_not_divided_by_accumulation",
        ),
        Fault(
            script,
            "multiplied by the ranks",
            "(loss / 3).backward()",
            "(loss * dist.get_world_size() / 3).backward()",
            "loss weight",
            "loss_multiplied_by_ranks",
        ),
    ]


FAULTS = (
    *of_rows_and_losses("fsdp2"),
    Fault(
        "fsdp2",
        "sync flag of the first micro-batch",
        "set_requires_gradient_sync(last)",
        "set_requires_gradient_sync(number % 3 == 1)",
        "gradient",
        "last_micro_batches_in_no_step",
    ),
    Fault(
        "fsdp2",
        "optimizer made before the model is sharded",
        "    model = Model()\n",
        "    model = Model()\n    made = torch.optim.Adam(model.parameters(), lr=0.01)\n"
        "    torch.optim.Adam = lambda *_, **__: made\n",
        "updates",
        "optimizer_of_a_copy",
    ),
    Fault(
        "fsdp2",
        "clipped in parts",
        "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        "[nn.utils.clip_grad_norm_(p, 0.1) for p in model.parameters()]",
        "clipping",
        "clipped_in_parts",
    ),
    Fault("fsdp2", "rate by rank", "lr=0.01", "lr=0.01 * (1 + dist.get_rank())", "rate", "rates_differ_between_ranks"),
    Fault(
        "fsdp2",
        "schedule advanced for each rank",
        "schedule.step()",
        "[schedule.step() for _ in range(dist.get_world_size())]",
        "schedule",
        "schedule_advances_once_per_rank",
    ),
    *of_rows_and_losses("fsdp1"),
    Fault(
        "fsdp1",
        "gradients cleared at each micro-batch",
        "            with nullcontext()",
        "            optimizer.zero_grad()\n            with nullcontext()",
        "gradient",
        "gradients_removed_between_micro_batches",
    ),
    Fault(
        "fsdp1",
        "clipped by the rank's own norm",
        "model.clip_grad_norm_(0.1)",
        "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        "clipping",
        "clipped_by_another_norm",
    ),
    Fault(
        "fsdp1",
        "unsharded, and never reduced",
        "use_orig_params=ORIGINAL)",
        "use_orig_params=ORIGINAL, device_mesh=dist.init_device_mesh('cpu', (2, 1), mesh_dim_names=('a', 'b')), "
        "sharding_strategy=torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD)",
        "gradient",
        "gradients_divided_and_never_reduced",
    ),
    Fault(
        "pipeline",
        "not scaled",
        "MICRO, loss_fn",
        "MICRO, scale_grads=False, loss_fn",
        "loss weight",
        "micro_batches_never_divided",
    ),
    Fault(
        "pipeline",
        "divided as well",
        ".mean())",
        ".mean() / MICRO)",
        "loss weight",
        "micro_batches_divided_twice",
    ),
)
