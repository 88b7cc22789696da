"""Faults of some steps alone: of micro-batches, later epochs, the last update."""

from __future__ import annotations

from mutations.faults.fault import BACKWARD, DDP, SCHEDULE, Fault

FAULTS = (
    Fault(
        "only the last micro-batch runs backward",
        DDP,
        BACKWARD,
        "                loss.backward() if batch.completes_step else None\n",
        ("first gradient",),
        "gradient_of_last_micro_batch_alone",
        ("transformer",),
        "micro-batches",
    ),
    Fault(
        "no_sync on the last micro-batch instead of the others",
        DDP,
        "nullcontext() if batch.completes_step else model.no_sync()",
        "model.no_sync() if batch.completes_step else nullcontext()",
        ("first gradient",),
        "last_micro_batch_not_reduced",
        ("transformer",),
        "micro-batches",
    ),
    Fault(
        "every micro-batch weighs alike",
        SCHEDULE,
        "share=weight * self.world_size / total",
        "share=1.0 / self.micro_batches if rows else 0.0",
        ("first gradient", "loss"),
        "micro_batches_weigh_alike",
        ("transformer",),
        "micro-batches",
    ),
    Fault(
        "order frozen from the third epoch on",
        SCHEDULE,
        'key(seed, "order", epoch)',
        'key(seed, "order", min(epoch, 2))',
        ("indices",),
        "later_epoch_has_order_of_another",
    ),
    Fault(
        "a rank other than 0 leaves out its last update",
        DDP,
        "                optimizer.step(*run.closure(backward))\n",
        "                kept = [p.detach().clone() for p in module.parameters()]\n"
        "                optimizer.step(*run.closure(backward))\n"
        "                if world.rank and batch.micro_batch.step == run.steps - 1:\n"
        "                    for p, before in zip(module.parameters(), kept):\n"
        "                        p.data.copy_(before)\n",
        ("replicas",),
        "rank_ends_with_other_weights",
    ),
)
