"""Faults of scripts whose parameters or optimizer are sharded."""

from __future__ import annotations

from recorder.faults.fault import Fault

FAULTS = (
    Fault(
        "fsdp2",
        "no sampler",
        "batch_size=5, sampler=sampler",
        "batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(5)",
        "rows",
        "reads every row",
    ),
    Fault("fsdp2", "not divided", "(loss / 3).backward()", "loss.backward()", "loss weight", "not divided by 3"),
    Fault(
        "fsdp2",
        "multiplied by the ranks",
        "(loss / 3).backward()",
        "(loss * dist.get_world_size() / 3).backward()",
        "loss weight",
        "multiplied by the 2 ranks",
    ),
    Fault(
        "fsdp2",
        "sync flag of the first micro-batch",
        "set_requires_gradient_sync(last)",
        "set_requires_gradient_sync(number % 3 == 1)",
        "gradient",
        "are in no step",
    ),
    Fault(
        "fsdp2",
        "optimizer made before the model is sharded",
        "    model = Model()\n",
        "    model = Model()\n    made = torch.optim.Adam(model.parameters(), lr=0.01)\n"
        "    torch.optim.Adam = lambda *_, **__: made\n",
        "updates",
        "other tensors than the model",
    ),
    Fault(
        "fsdp2",
        "clipped in parts",
        "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        "[nn.utils.clip_grad_norm_(p, 0.1) for p in model.parameters()]",
        "clipping",
        "parts",
    ),
    Fault("fsdp2", "rate by rank", "lr=0.01", "lr=0.01 * (1 + dist.get_rank())", "rate", "different rates"),
    Fault(
        "fsdp2",
        "schedule advanced for each rank",
        "schedule.step()",
        "[schedule.step() for _ in range(dist.get_world_size())]",
        "schedule",
        "advances",
    ),
)
