"""Faults that the proof cannot detect: docs/proof.md lists each, and a test sees that it passes."""

from __future__ import annotations

from mutations.faults.fault import BACKWARD, DDP, Fault

CONV, TIED = ("conv",), ("tied",)

# What a line of the docs begins with -> the fault that it speaks of.
LIMITS = {
    "What acts at steps that no training of the proof takes": Fault(
        "a loss that is wrong in epoch 50 alone",
        DDP,
        BACKWARD,
        "                (loss * 3 if batch.micro_batch.epoch == 50 else loss).backward()\n",
        (),
        "",
        TIED,
    ),
    "Numbers of ranks that were not tried": Fault(
        "gradients summed on 7 ranks alone",
        DDP,
        BACKWARD,
        "                (loss * world.size if world.size == 7 else loss).backward()\n",
        (),
        "",
        TIED,
    ),
    "A mistake in your own job": Fault(
        "a job whose targets are of the rows beside",
        DDP,
        "import torch\n",
        "import torch\n",
        (),
        "",
        ("mistaken",),
    ),
    "A missing `GradScaler`": Fault(
        "amp: no scaler",
        "engines/amp.py",
        'enabled=precision == "fp16"',
        "enabled=False",
        (),
        "",
        TIED,
        engine="amp",
        settings={"precision": "fp16"},
    ),
    "PowerSGD that never compresses": Fault(
        "ddp: PowerSGD begins late",
        DDP,
        "start_powerSGD_iter=EXACT",
        "start_powerSGD_iter=10**6",
        (),
        "",
        CONV,
        settings={"compress": "powersgd"},
    ),
    "Clipping that never acts": Fault(
        "clipping left out where no gradient is too large",
        DDP,
        "if batch.completes_step and job.clip_norm is not None:",
        "if batch.completes_step and job.clip_norm is not None and job.clip_norm < 100:",
        (),
        "",
        ("loosely_clipped",),
    ),
}
