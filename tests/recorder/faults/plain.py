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
        "ranks_begin_with_different_weights",
    ),
    Fault("ddp", "no sampler", "sampler=sampler)", "shuffle=True)", "rows", "rows_not_shared_out"),
    Fault("ddp", "set_epoch left out", "        sampler.set_epoch(epoch)\n", "", "order", "set_epoch_never_called"),
    Fault(
        "ddp",
        "forward through .module",
        "cross_entropy(model(rows)",
        "cross_entropy(model.module(rows)",
        "gradient",
        "ranks_never_reduce_gradients",
    ),
    Fault(
        "ddp",
        "averaged twice",
        "            nn.utils.clip",
        "            for p in model.parameters():\n                p.grad /= dist.get_world_size()\n"
        "            nn.utils.clip",
        "loss weight",
        "gradients_divided_by_ranks_again",
    ),
    Fault(
        "ddp",
        "loss divided by the ranks",
        "rows), targets)",
        "rows), targets) / dist.get_world_size()",
        "loss weight",
        "loss_divided_by_ranks",
    ),
    Fault(
        "ddp",
        "clipped in parts",
        "clip_grad_norm_(model.parameters(), 0.5)",
        "clip_grad_norm_(model.module[0].parameters(), 0.1); "
        "nn.utils.clip_grad_norm_(model.module[2].parameters(), 0.1)",
        "clipping",
        "clipped_in_parts",
    ),
    Fault(
        "ddp",
        "schedule advanced for each rank",
        "            schedule.step()",
        "            for _ in range(dist.get_world_size()):\n                schedule.step()",
        "schedule",
        "schedule_advances_once_per_rank",
    ),
    Fault(
        "ddp",
        "rate by rank",
        "lr=options.lr",
        "lr=options.lr * (1 + dist.get_rank())",
        "rate",
        "rates_differ_between_ranks",
    ),
    Fault(
        "ddp",
        "rank 1's weights decayed alone",
        "            schedule.step()",
        "            schedule.step()\n            if dist.get_rank() == 1:\n                with torch.no_grad():\n"
        "                    model.module[0].weight *= 0.999",
        "weights",
        "ranks_weights_drift_apart",
    ),
    Fault(
        "ddp",
        "optimizer of a copy",
        "optim.SGD(model.parameters()",
        "optim.SGD([p.detach().clone().requires_grad_() if p.dim() == 1 else p for p in model.parameters()]",
        "updates",
        "optimizer_of_a_copy",
    ),
    Fault("accumulate", "not divided", ".mean() / MICRO", ".mean()", "loss weight", "loss_not_divided_by_accumulation"),
    Fault(
        "accumulate",
        "sync flag of the first micro-batch",
        "last else model.no_sync()",
        "number % MICRO == 0 else model.no_sync()",
        "gradient",
        "reduced_before_last_micro_batch",
    ),
    Fault(
        "accumulate",
        "never synced",
        "contextlib.nullcontext() if last else model.no_sync()",
        "model.no_sync()",
        "gradient",
        "ranks_never_reduce_gradients",
    ),
    Fault(
        "accumulate",
        "gradients cleared at each micro-batch",
        "            with contextlib",
        "            optimizer.zero_grad()\n            with contextlib",
        "gradient",
        "gradients_removed_between_micro_batches",
    ),
    Fault(
        "accumulate",
        "clipped at each micro-batch",
        "                loss.backward()\n",
        "                loss.backward()\n                nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
        "gradient",
        "clipped_before_last_micro_batch",
    ),
    Fault(
        "accumulate",
        "schedule advanced at each micro-batch",
        "            if last:\n",
        "            schedule.step()\n            if last:\n",
        "schedule",
        "schedule_advances_several_times",
    ),
    Fault(
        "accumulate",
        "rows of half the ranks",
        "DistributedSampler(data)",
        "DistributedSampler(data, num_replicas=4, rank=dist.get_rank())",
        "rows",
        "rows_read_by_no_rank",
    ),
)
