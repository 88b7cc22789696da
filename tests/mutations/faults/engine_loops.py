"""The mistakes of a training loop, each in the loops of the engines that have the line."""

from __future__ import annotations

from mutations.faults.fault import ALL, Fault

GRADIENT = ("first gradient",)
CLIPPED, SCHEDULED = ("tied",), ("conv", "transformer")


def mistake(
    name: str,
    lines: dict[str, tuple[str, str]],
    named: tuple[str, ...],
    cause: str,
    jobs: tuple[str, ...] = ALL,
    needs: str = "",
) -> list[Fault]:
    """Returns a mistake as a fault of each engine. lines: by engine, its line and what stands in its place."""
    return [
        Fault(f"{engine}: {name}", f"engines/{engine}.py", old, new, named, cause, jobs, needs, engine)
        for engine, (old, new) in lines.items()
    ]


CLEARED = "                optimizer.zero_grad()\n"
CLEARED_SOMETIMES = "                if batch.micro_batch.step % 3 != 1:\n                    optimizer.zero_grad()\n"
NO_SYNC = ("with nullcontext() if batch.completes_step else model.no_sync():", "with model.no_sync():")
UNCLIPPED = ("if job.clip_norm is not None:", "if False:")
STEPPED = "                    scheduler.step()\n"
N_TIMES = "                    for _ in range(world.size):\n                        scheduler.step()\n"
SCALED = ("loss.backward()", "(loss * world.size).backward()")

FAULTS = (
    *mistake(
        "gradient multiplied by the ranks",
        {
            "fsdp": SCALED,
            "zero": SCALED,
            "amp": ("scaler.scale(loss).backward()", "scaler.scale(loss * world.size).backward()"),
            "accelerate": ("accelerator.backward(loss)", "accelerator.backward(loss * world.size)"),
            "fabric": ("fabric.backward(loss)", "fabric.backward(loss * world.size)"),
            "hf": ("return self.loss * run.schedule", "return self.loss * world.size * run.schedule"),
            "lightning": (
                "return run.loss(self.model, batch) * run.schedule",
                "return run.loss(self.model, batch) * world.size * run.schedule",
            ),
            "deepspeed": (
                "engine.backward(loss * micro_batches)",
                "engine.backward(loss * micro_batches * world.size)",
            ),
        },
        GRADIENT,
        "gradients_summed_instead_of_averaged",
    ),
    *mistake(
        "gradients not reduced",
        {
            "zero": NO_SYNC,
            "amp": NO_SYNC,
            "accelerate": (
                "with nullcontext() if batch.completes_step else accelerator.no_sync(model):",
                "with accelerator.no_sync(model):",
            ),
            "fabric": ("enabled=not batch.completes_step", "enabled=True"),
        },
        GRADIENT,
        # Under zero each rank trains its part of the parameters by its own gradients: that is no candidate.
        "gradients_never_reduced|part_of_gradient_missing_or_repeated cause_unknown",
    ),
    *mistake(
        "gradients not clipped",
        {
            "fsdp": UNCLIPPED,
            "zero": UNCLIPPED,
            "accelerate": ("if batch.completes_step and job.clip_norm is not None:", "if False:"),
            "fabric": ("if batch.completes_step and job.clip_norm is not None:", "if False:"),
            "lightning": ("gradient_clip_val=job.clip_norm", "gradient_clip_val=None"),
            "horovod": UNCLIPPED,
        },
        ("loss",),
        "clipping_left_out|update_wrong_at_one_step cause_unknown",
        CLIPPED,
        "clipping",
    ),
    *mistake(
        "the norm of the rank's shards alone clipped",
        {
            "fsdp": (
                "                    (clip_whole_norm if world.mesh else clip_grad_norm_)"
                "(model.parameters(), job.clip_norm)\n",
                "                    shards = [p.grad.to_local() for p in model.parameters() if p.grad is not None]\n"
                "                    norm = torch.nn.utils.get_total_norm(shards)\n"
                "                    for shard in shards:\n"
                "                        shard.mul_(min(1.0, job.clip_norm / (float(norm) + 1e-6)))\n",
            )
        },
        ("loss",),
        "clipping_left_out|update_wrong_at_one_step cause_unknown",
        CLIPPED,
        "clipping",
    ),
    *mistake(
        "the scheduler stepped once for each rank",
        {engine: (STEPPED, N_TIMES) for engine in ("fsdp", "zero", "amp", "accelerate", "fabric")},
        ("learning rate",),
        "scheduler_steps_once_for_each_rank|scheduler_steps_at_other_times",
        SCHEDULED,
        "a scheduler",
    ),
    *mistake(
        "gradients not cleared at a third of the steps",
        {engine: (CLEARED, CLEARED_SOMETIMES) for engine in ("fsdp", "zero", "amp")},
        ("loss",),
        "gradients_not_cleared",
    ),
)
