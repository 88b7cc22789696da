"""Faults of scripts with other optimizers, precisions, data sets and compiled models."""

from __future__ import annotations

from recorder.faults.fault import Fault

EPOCH = "        sampler.set_epoch(epoch)\n"
SHARE = "each, first = dist.get_world_size() * workers, dist.get_rank() * workers + number"
FAULTS = (
    Fault("zero_optimizer", "not wrapped", "DistributedDataParallel(nn.", "(nn.", "gradient", "never reduced"),
    Fault(
        "zero_optimizer",
        "gradients never cleared",
        "            optimizer.zero_grad()\n",
        "",
        "gradient",
        "zero_grad is missing",
    ),
    Fault("zero_optimizer", "rate by rank", "lr=0.01)", "lr=0.01 * (1 + dist.get_rank()))", "rate", "different rates"),
    Fault(
        "zero_optimizer",
        "schedule advanced for each rank",
        "            schedule.step()\n",
        "            schedule.step()\n            schedule.step()\n",
        "schedule",
        "once for each rank",
    ),
    Fault("compiled", "set_epoch left out", EPOCH, "", "order", "never called"),
    Fault("compiled", "forward through .module", "(model(rows)", "(model.module(rows)", "gradient", "never reduced"),
    Fault(
        "compiled",
        "loss divided by the ranks",
        "loss.backward()",
        "(loss / dist.get_world_size()).backward()",
        "loss weight",
        "averaged twice",
    ),
    Fault("compiled", "rate by rank", "lr=0.01)", "lr=0.01 * (1 + dist.get_rank()))", "rate", "different rates"),
    Fault(
        "scaler", "clipped while scaled", "            scaler.unscale_(optimizer)\n", "", "clipping", "scaler.unscale_"
    ),
    Fault(
        "scaler",
        "loss times the ranks",
        "scaler.scale(loss)",
        "scaler.scale(2 * loss)",
        "loss weight",
        "multiplied by the 2 ranks",
    ),
    Fault("scaler", "forward through .module", "(model(rows)", "(model.module(rows)", "gradient", "never reduced"),
    Fault(
        "scaler",
        "gradients never cleared",
        "            optimizer.zero_grad()\n",
        "",
        "gradient",
        "zero_grad is missing",
    ),
    Fault("iterable", "shared out by worker alone", SHARE, "each, first = workers, number", "rows", "not shared out"),
    Fault("iterable", "not wrapped", "DistributedDataParallel(nn.", "(nn.", "gradient", "never reduced"),
    Fault(
        "iterable",
        "loss divided by the ranks",
        "loss.backward()",
        "(loss / 2).backward()",
        "loss weight",
        "averaged twice",
    ),
    Fault("iterable", "rate by rank", "lr=0.01)", "lr=0.01 * (1 + dist.get_rank()))", "rate", "different rates"),
    Fault("mapping", "no sampler", "sampler=sampler, ", "shuffle=True, ", "rows", "reads every row"),
    Fault("mapping", "set_epoch left out", EPOCH, "", "order", "never called"),
    Fault(
        "mapping",
        "forward through .module",
        "model(**batch)",
        "model.module(**batch)",
        "gradient",
        "never reduced",
    ),
    Fault(
        "mapping",
        "gradients never cleared",
        "            optimizer.zero_grad()\n",
        "",
        "gradient",
        "zero_grad is missing",
    ),
    Fault(
        "spawned",
        "seeded before the ranks start, not wrapped",
        "DistributedDataParallel(nn.",
        "(nn.",
        "initial weights",
        "common seed",
    ),
    Fault("spawned", "set_epoch left out", EPOCH, "", "order", "never called"),
    Fault(
        "spawned",
        "sampler of one rank",
        "DistributedSampler(data, size, rank)",
        "DistributedSampler(data, size, 0)",
        "rows",
        "not shared out",
    ),
    Fault(
        "spawned",
        "split by own random numbers",
        "data = TensorDataset(x, x.sum(1, keepdim=True))",
        "data, _ = torch.utils.data.random_split(TensorDataset(x, x.sum(1, keepdim=True)), [40, 8])",
        "rows",
        "random_split without a common generator",
    ),
    Fault(
        "spawned",
        "loss divided by the ranks",
        "loss.backward()",
        "(loss / size).backward()",
        "loss weight",
        "averaged twice",
    ),
)
