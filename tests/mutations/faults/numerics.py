"""Faults of engines that are inexact by design, and of their precision."""

from __future__ import annotations

from mutations.faults.fault import DDP, Fault

FAULTS = (
    Fault(
        "fsdp: bf16's gradients reduced in bf16",
        "engines/fsdp.py",
        "lower = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if",
        "lower = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16) if",
        ("precision",),
        "gradients_averaged_in_lower_precision",
        engine="fsdp",
        settings={"precision": "bf16"},
    ),
    Fault(
        "amp: the ranks' gradients averaged in bf16",
        "engines/amp.py",
        "        optimizer = job.optimizer.build(module)\n",
        "        model.register_comm_hook(None, lambda _, bucket: torch.distributed.all_reduce(\n"
        "            bucket.buffer().bfloat16().div_(world.size), async_op=True\n"
        "        ).get_future().then(lambda done: bucket.buffer().copy_(done.value()[0])))\n"
        "        optimizer = job.optimizer.build(module)\n",
        ("precision", "first gradient"),
        "",
        engine="amp",
    ),
    Fault(
        "ddp: an autocast around the forward of compressed gradients",
        DDP,
        "        module = job.model().to(world.device)\n",
        "        module = job.model().to(world.device)\n"
        "        module.forward = torch.autocast('cpu', torch.bfloat16)(module.forward)\n",
        ("loss", "precision"),
        "",
        settings={"compress": "fp16"},
    ),
    Fault(
        "ddp: outputs of compressed gradients cast to bf16",
        DDP,
        "        module = job.model().to(world.device)\n",
        "        module = job.model().to(world.device)\n"
        "        def cast(_, given, out):\n"
        "            return out.bfloat16().to(out.dtype) if out.element_size() == 4 else out\n\n"
        "        module.register_forward_hook(cast)\n",
        ("loss",),
        "",
        settings={"compress": "fp16"},
    ),
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
