"""Faults that float64 hides: something is computed, sent or kept in a lower precision than the job's own."""

from __future__ import annotations

from mutations.faults.fault import BACKWARD, DDP, RUN, Fault

ALONE = "wrong_in_own_dtype_alone"
MODEL = "        module = job.model().to(world.device)\n"

FAULTS = (
    Fault(
        "ddp: float32 gradients rounded to bf16",
        DDP,
        BACKWARD,
        BACKWARD
        + "                for p in module.parameters():\n"
        + "                    if p.grad is not None and p.grad.dtype == torch.float32:\n"
        + "                        p.grad.copy_(p.grad.bfloat16())\n",
        ("first gradient",),
        ALONE,
        also="own",
    ),
    Fault(
        "ddp: an autocast around the model's forward",
        DDP,
        MODEL,
        MODEL + '        module.forward = torch.autocast("cpu", torch.bfloat16)(module.forward)\n',
        ("loss", "precision"),
        ALONE,
        also="own",
    ),
    Fault(
        "ddp: float32 weights rounded to fp16 by each step",
        DDP,
        "                optimizer.zero_grad()\n",
        "                optimizer.zero_grad()\n"
        + "                for p in module.parameters():\n"
        + "                    if p.dtype == torch.float32:\n"
        + "                        p.data.copy_(p.data.half())\n",
        ("loss", "first gradient"),
        ALONE,
        also="own",
    ),
    Fault(
        "float32 losses rounded to bf16",
        RUN,
        "        if loss.dim() != 0:\n",
        '        loss = loss.bfloat16().float() if str(loss.dtype) == "torch.float32" else loss\n'
        "        if loss.dim() != 0:\n",
        ("loss",),
        ALONE,
        also="own",
    ),
    Fault(
        "fsdp: float32 gradients reduced in bf16",
        "engines/fsdp.py",
        ' if precision != "full" else MixedPrecisionPolicy()\n',
        ' if precision != "full" else MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)'
        " if next(model.parameters()).dtype == torch.float32 else MixedPrecisionPolicy()\n",
        ("first gradient",),
        ALONE,
        engine="fsdp",
        also="own",
    ),
)
