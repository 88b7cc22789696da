"""Faults of the ranks above LAST alone. With LAST = 3 fewer than five ranks do not show them; with LAST = 99 the same
lines are healthy."""

from __future__ import annotations

from dataclasses import replace

from mutations.faults.fault import BACKWARD, DDP, EVALUATE, SCHEDULE, STEP, WRAPPED, Fault

FSDP, ZERO, AMP = "engines/fsdp.py", "engines/zero.py", "engines/amp.py"
TIED, CONV, TRANSFORMER = ("tied",), ("conv",), ("transformer",)
GRADIENT = ("first gradient",)


def of_ranks_above(last: int, fault: Fault) -> Fault:
    """The fault on ranks above `last`."""
    return replace(fault, new=fault.new.replace("LAST", str(last)))


FAULTS = (
    Fault(
        "gradients lost",
        DDP,
        BACKWARD,
        "                (loss if world.rank <= LAST else loss * 0).backward()\n",
        GRADIENT,
        "",
        TIED,
    ),
    Fault(
        "gradients averaged over so many ranks at most",
        DDP,
        BACKWARD,
        "                (loss * world.size / min(world.size, LAST + 1)).backward()\n",
        GRADIENT,
        "",
        TIED,
    ),
    Fault(
        "gradients rounded to float32",
        DDP,
        "                optimizer.step(*run.closure(backward))\n",
        "                for p in module.parameters() if world.rank > LAST else ():\n"
        "                    p.grad = p.grad.float().double()\n"
        "                optimizer.step(*run.closure(backward))\n",
        ("replicas", "loss"),
        "",
        TIED,
    ),
    Fault(
        "other first weights",
        DDP,
        WRAPPED,
        "        for p in module.parameters():\n            p.data.add_((world.rank > LAST) * 1e-3)\n" + WRAPPED,
        ("initial weights",),
        "",
        TIED,
    ),
    Fault(
        "another learning rate",
        DDP,
        WRAPPED,
        WRAPPED + '        for group in optimizer.param_groups:\n            group["lr"] *= 1 + (world.rank > LAST)\n',
        ("learning rate",),
        "",
        CONV,
    ),
    Fault(
        "scheduler stepped twice",
        DDP,
        "                    scheduler.step()\n",
        "                    for _ in range(1 + (world.rank > LAST)):\n                        scheduler.step()\n",
        ("learning rate",),
        "",
        CONV,
    ),
    Fault(
        "last update left out",
        DDP,
        "                optimizer.step(*run.closure(backward))\n",
        "                before = [p.detach().clone() for p in module.parameters()]\n"
        "                optimizer.step(*run.closure(backward))\n"
        "                if world.rank > LAST and batch.micro_batch.step == run.steps - 1:\n"
        "                    for p, value in zip(module.parameters(), before):\n"
        "                        p.data.copy_(value)\n",
        ("replicas",),
        "",
        TIED,
    ),
    Fault(
        "clipped to half the norm",
        DDP,
        "clip_grad_norm_(model.parameters(), job.clip_norm)",
        "clip_grad_norm_(model.parameters(), job.clip_norm / (1 + (world.rank > LAST)))",
        ("loss", "replicas"),
        "",
        TIED,
    ),
    Fault(
        "input moved",
        DDP,
        "                loss = run.loss(trained, batch)\n",
        "                batch.data[0].add_(0.01 * (world.rank > LAST))\n"
        "                loss = run.loss(trained, batch)\n",
        ("tensors received",),
        "",
        CONV,
    ),
    Fault(
        "dropout of the rank before",
        STEP,
        "micro_batch.micro, replica)",
        "micro_batch.micro, min(replica, LAST))",
        ("loss",),
        "",
        TRANSFORMER,
    ),
    Fault(
        "share of the last batch lost",
        SCHEDULE,
        "share=weight * self.world_size / total",
        "share=weight * self.world_size / total * (replica <= LAST or len(step_rows) == self.global_batch)",
        ("loss", "parameter"),
        "",
        TIED,
    ),
    Fault(
        "rows of the rank before",
        SCHEDULE,
        "first = sum(per_replica[:replica])",
        "first = sum(per_replica[: min(replica, LAST)])",
        ("indices",),
        "",
        TIED,
    ),
    Fault(
        "rows of the next epoch",
        SCHEDULE,
        "step_rows = self._global_batch(epoch, batch)",
        "step_rows = self._global_batch(epoch + (replica > LAST), batch)",
        ("indices",),
        "",
        TIED,
    ),
    Fault(
        "order frozen from the third epoch on",
        SCHEDULE,
        "step_rows = self._global_batch(epoch, batch)",
        "step_rows = self._global_batch(epoch if replica <= LAST else min(epoch, 2), batch)",
        ("indices",),
        "",
        TIED,
    ),
    Fault(
        "evaluated rows lost",
        EVALUATE,
        "        dist.all_reduce(table)",
        "        table *= world.rank <= LAST\n        dist.all_reduce(table)",
        ("evaluation rows",),
        "",
        TRANSFORMER,
    ),
    Fault(
        "evaluation in training mode",
        EVALUATE,
        "    model.eval()\n",
        "    model.train(world.rank > LAST)\n",
        ("evaluation",),
        "",
        TRANSFORMER,
    ),
    Fault(
        "fsdp: gradients lost",
        FSDP,
        "                loss.backward()\n",
        "                (loss if world.rank <= LAST else loss * 0).backward()\n",
        GRADIENT,
        "",
        TIED,
        engine="fsdp",
    ),
    Fault(
        "fsdp: shard not updated",
        FSDP,
        "                optimizer.step()\n",
        "                optimizer.step() if world.rank <= LAST else None\n",
        (*GRADIENT, "learning rate", "optimizer steps"),
        "",
        TRANSFORMER,
        engine="fsdp",
    ),
    Fault(
        "zero: shard updated without a gradient",
        ZERO,
        "                optimizer.step()\n",
        "                for p in module.parameters() if world.rank > LAST else ():\n"
        "                    p.grad.zero_()\n"
        "                optimizer.step()\n",
        GRADIENT,
        "",
        TRANSFORMER,
        engine="zero",
    ),
    Fault(
        "amp: no autocast",
        AMP,
        "torch.autocast(device, DTYPES[precision])",
        "torch.autocast(device, DTYPES[precision], enabled=world.rank <= LAST)",
        ("precision",),
        "",
        TIED,
        engine="amp",
    ),
)
