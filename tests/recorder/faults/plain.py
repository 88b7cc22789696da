"""Faults of scripts on DistributedDataParallel."""

from __future__ import annotations

from recorder.faults.fault import Fault

FAULTS = (
    Fault(
        "ddp",
        "rank 1 initialised by another seed, not wrapped",
        "    model = DistributedDataParallel(model)\n",
        "    for p in model.parameters():\n        p.data += dist.get_rank()\n",
        "initial weights",
        "common seed",
    ),
    Fault("ddp", "no sampler", "sampler=sampler)", "shuffle=True)", "rows", "reads every row"),
    Fault("ddp", "set_epoch left out", "        sampler.set_epoch(epoch)\n", "", "order", "never called"),
    Fault(
        "ddp",
        "forward through .module",
        "cross_entropy(model(rows)",
        "cross_entropy(model.module(rows)",
        "gradient",
        "never reduced",
    ),
    Fault(
        "ddp",
        "averaged twice",
        "            nn.utils.clip",
        "            for p in model.parameters():\n                p.grad /= dist.get_world_size()\n"
        "            nn.utils.clip",
        "loss weight",
        "averaged twice",
    ),
    Fault(
        "ddp",
        "loss divided by the ranks",
        "rows), targets)",
        "rows), targets) / dist.get_world_size()",
        "loss weight",
        "averaged twice",
    ),
    Fault(
        "ddp",
        "clipped in parts",
        "clip_grad_norm_(model.parameters(), 0.5)",
        "clip_grad_norm_(model.module[0].parameters(), 0.1); "
        "nn.utils.clip_grad_norm_(model.module[2].parameters(), 0.1)",
        "clipping",
        "norm of all parameters",
    ),
    Fault(
        "ddp",
        "schedule advanced for each rank",
        "            schedule.step()",
        "            for _ in range(dist.get_world_size()):\n                schedule.step()",
        "schedule",
        "once for each rank",
    ),
    Fault("ddp", "rate by rank", "lr=options.lr", "lr=options.lr * (1 + dist.get_rank())", "rate", "different rates"),
    Fault(
        "ddp",
        "rank 1's weights decayed alone",
        "            schedule.step()",
        "            schedule.step()\n            if dist.get_rank() == 1:\n                with torch.no_grad():\n"
        "                    model.module[0].weight *= 0.999",
        "weights",
        "drifted apart",
    ),
    Fault(
        "ddp",
        "optimizer of a copy",
        "optim.SGD(model.parameters()",
        "optim.SGD([p.detach().clone().requires_grad_() if p.dim() == 1 else p for p in model.parameters()]",
        "updates",
        "no step moves",
    ),
    Fault("accumulate", "not divided", ".mean() / MICRO", ".mean()", "loss weight", "3 accumulated micro-batches"),
    Fault(
        "accumulate",
        "sync flag of the first micro-batch",
        "last else model.no_sync()",
        "number % MICRO == 0 else model.no_sync()",
        "gradient",
        "before the last micro-batch",
    ),
    Fault(
        "accumulate",
        "never synced",
        "contextlib.nullcontext() if last else model.no_sync()",
        "model.no_sync()",
        "gradient",
        "never reduced",
    ),
    Fault(
        "accumulate",
        "gradients cleared at each micro-batch",
        "            with contextlib",
        "            optimizer.zero_grad()\n            with contextlib",
        "gradient",
        "removed before the step",
    ),
    Fault(
        "accumulate",
        "clipped at each micro-batch",
        "                loss.backward()\n",
        "                loss.backward()\n                nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
        "gradient",
        "before the gradient is whole",
    ),
    Fault(
        "accumulate",
        "schedule advanced at each micro-batch",
        "            if last:\n",
        "            schedule.step()\n            if last:\n",
        "schedule",
        "several times a step",
    ),
    Fault(
        "accumulate",
        "rows of half the ranks",
        "DistributedSampler(data)",
        "DistributedSampler(data, num_replicas=4, rank=dist.get_rank())",
        "rows",
        "read by no rank",
    ),
)
