"""Faults that begin to act, or cease to, in a later epoch than a proof's first ones."""

from __future__ import annotations

from mutations.faults.fault import DDP, LOADER, RUN, SCHEDULE, STEP, Fault

LATE = "wrong_in_later_epoch"
SHARED_OUT = "return loss if share == 1.0 else loss * share"

FAULTS = (
    Fault(
        "a rank's share left out from the third epoch on",
        RUN,
        SHARED_OUT,
        "return loss if share == 1.0 or batch.micro_batch.epoch > 1 else loss * share",
        ("loss",),
        LATE,
        also="late",
    ),
    Fault(
        "a rank's share left out from epoch 90 on",
        RUN,
        SHARED_OUT,
        "return loss if share == 1.0 or batch.micro_batch.epoch > 90 else loss * share",
        ("loss", "parameter"),
        LATE,
        also="late",
    ),
    Fault(
        "a schedule that ends with the second epoch",
        DDP,
        "scheduler.step()",
        "scheduler.step() if batch.micro_batch.epoch < 2 else None",
        ("learning rate",),
        LATE,
        ("conv", "transformer"),
        "a schedule",
        also="late",
    ),
    Fault(
        "dropout alike in all steps from the third epoch on",
        STEP,
        '"replica", micro_batch.step, micro_batch.micro',
        '"replica", micro_batch.step if micro_batch.epoch < 2 else 0, micro_batch.micro',
        ("loss",),
        LATE,
        ("conv", "transformer"),
        "dropout",
        also="late",
    ),
    Fault(
        "an augmentation alike in all epochs from the third on",
        LOADER,
        '(self.seed, "augment", self.epoch, index, *again)',
        '(self.seed, "augment", min(self.epoch, 2), index, *again)',
        ("tensors received",),
        LATE,
        ("sentences",),
        "an augmentation",
        also="late",
    ),
    Fault(
        "weights ignored from the third epoch on",
        SCHEDULE,
        "            weight = self._weigh(indices)\n",
        "            weight = self._weigh(indices) if epoch < 2 else float(len(indices))\n",
        ("weight",),
        LATE,
        ("sentences",),
        "weights",
        also="late",
    ),
)
