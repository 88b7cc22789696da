"""Faults of engines that are inexact by design, and of their precision."""

from __future__ import annotations

from mutations.faults.fault import DDP, Fault

FAULTS = (
    Fault(
        "ddp: gradients compressed to fp16 and summed",
        "engines/ddp.py",
        'model.register_comm_hook(None, getattr(default_hooks, compress + "_compress_hook"))',
        "\n"
        "            def summed(_, bucket):\n"
        "                sent = dist.all_reduce(bucket.buffer().half(), async_op=True).get_future()\n"
        "                return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))\n\n"
        "            model.register_comm_hook(None, summed)",
        ("first gradient", "loss"),
        "gradients_summed_instead_of_averaged",
        settings={"compress": "fp16"},
    ),
    Fault(
        "amp: no autocast",
        "engines/amp.py",
        "with torch.autocast(device, DTYPES[precision]):",
        "with nullcontext():",
        ("precision",),
        "lower_precision_not_in_force",
        engine="amp",
    ),
    Fault(
        "ddp: the compressing hook never registered",
        DDP,
        'elif compress != "none":',
        'elif compress == "never":',
        ("precision",),
        "lower_precision_not_in_force",
        settings={"compress": "fp16"},
    ),
    Fault(
        "fsdp: asked for bf16, sharded in float32",
        "engines/fsdp.py",
        "lower = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if",
        "lower = MixedPrecisionPolicy() if",
        ("precision",),
        "lower_precision_not_in_force",
        engine="fsdp",
        settings={"precision": "bf16"},
    ),
    Fault(
        "ddp: PowerSGD's hook only sums",
        DDP,
        "            model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=EXACT), powerSGD_hook)",
        "            def summed(state, bucket):\n"
        "                return powerSGD_hook(state, bucket).then(lambda done: done.value() * world.size)\n\n"
        "            model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=EXACT), summed)",
        ("first gradient",),
        "gradients_summed_instead_of_averaged",
        settings={"compress": "powersgd"},
    ),
)
