"""Faults that only a replay in one process tells: all ranks do them alike."""

from __future__ import annotations

from recorder.faults.fault import Fault

REPLAY_FAULTS = (
    Fault(
        "ddp",
        "rate scaled by the ranks",
        "lr=options.lr,",
        "lr=options.lr * dist.get_world_size(),",
        "replayed rate",
        "rate_depends_on_ranks",
    ),
    Fault(
        "ddp",
        "clipped by the number of ranks",
        "clip_grad_norm_(model.parameters(), 0.5)",
        "clip_grad_norm_(model.parameters(), 0.1 / dist.get_world_size())",
        "replayed gradient",
        "clipping_depends_on_ranks",
    ),
    Fault(
        "accumulate",
        "loss scaled by the rank's rows",
        ".mean() / MICRO",
        ".mean() / MICRO * len(x) / 5",
        "replayed gradient",
        "gradient_divided_by_the_ranks",
    ),
    Fault(
        "accumulate",
        "micro-batches by the ranks",
        "MICRO = 3\n",
        'MICRO = 1 + int(__import__("os").environ["WORLD_SIZE"])\n',
        "replayed micro-batches",
        "accumulation_depends_on_ranks",
    ),
    Fault(
        "tokens",
        "mean over the rank's own tokens",
        "            dist.all_reduce(tokens)\n            tokens = tokens / dist.get_world_size()\n",
        "",
        "loss weight",
        "mean_of_means_over_ranks",
    ),
    Fault(
        "tokens",
        "weights decayed by the ranks",
        "            optimizer.step()",
        "            optimizer.step()\n            with torch.no_grad():\n"
        "                for p in model.parameters():\n                    p *= 1 - 0.002 * dist.get_world_size()",
        "replayed weights",
        "weights_end_elsewhere",
    ),
    Fault(
        "noisy",
        "rate scaled by the ranks",
        "lr=0.05",
        "lr=0.05 * dist.get_world_size()",
        "replayed rate",
        "rate_depends_on_ranks",
    ),
    Fault(
        "own_batches",
        "loss scaled by the ranks",
        "/ y.numel()",
        "/ y.numel() * size",
        "replayed gradient",
        "gradient_multiplied_by_the_ranks",
    ),
    Fault(
        "own_batches", "rate scaled by the ranks", "lr=0.1", "lr=0.1 * size", "replayed rate", "rate_depends_on_ranks"
    ),
    Fault(
        "gan",
        "generator's loss times the ranks",
        "g_loss.backward()",
        "(g_loss * dist.get_world_size()).backward()",
        "replayed gradient",
        "gradient_multiplied_by_the_ranks",
    ),
    Fault(
        "gan",
        "rate times the ranks",
        "lr=0.2)",
        "lr=0.2 * dist.get_world_size())",
        "replayed rate",
        "rate_depends_on_ranks",
    ),
    Fault(
        "fsdp2",
        "rate times the ranks",
        "lr=0.01",
        "lr=0.01 * dist.get_world_size()",
        "replayed rate",
        "rate_depends_on_ranks",
    ),
    Fault(
        "fsdp2",
        "clipped by the number of ranks",
        "clip_grad_norm_(model.parameters(), 0.1)",
        "clip_grad_norm_(model.parameters(), 0.1 / dist.get_world_size())",
        "replayed gradient",
        "clipping_depends_on_ranks",
    ),
    Fault(
        "fsdp2",
        "weights decayed by the ranks",
        "                optimizer.step()",
        "                optimizer.step()\n                with torch.no_grad():\n"
        "                    for p in model.parameters():\n"
        "                        p.mul_(1 - 0.002 * dist.get_world_size())",
        "replayed gradient",
        "steps_come_apart",
    ),
    Fault(
        "spawned",
        "rate times the ranks",
        "lr=0.05",
        "lr=0.05 * size",
        "replayed rate",
        "rate_depends_on_ranks",
    ),
    *(
        Fault(f"deepspeed_engine {stage}", *planted)
        for stage in (0, 2, 3)
        for planted in (
            (
                "rate times the ranks",
                "lr=0.01),",
                "lr=0.01 * dist.get_world_size()),",
                "replayed rate",
                "rate_depends_on_ranks",
            ),
            (
                "clipped by the number of ranks",
                '"gradient_accumulation_steps": 3,',
                '"gradient_accumulation_steps": 3, "gradient_clipping": 0.1 / dist.get_world_size(),',
                "replayed gradient",
                "clipping_depends_on_ranks",
            ),
        )
    ),
)
