"""The rows, augmentations and random numbers of a continued training."""

from __future__ import annotations

from resume.faults.fault import RUN, SCHEDULE, ResumeFault

PARTS = (
    "            micro_batches = self.step(replica, *self.place_of(step))\n"
    "            yield from (replace(part, step=step) for part in micro_batches) if self.played else micro_batches\n"
)


def parts_of(rows: str, epoch: str = "epoch") -> str:
    """The schedule's loop over steps, where a continued training reads the rows of other steps."""
    return (
        "            epoch, number = divmod(step, self.steps_per_epoch)\n"
        f"            for part in self.step(replica, {rows}):\n"
        f"                yield __import__('dataclasses').replace(part, epoch={epoch}, step=step)\n"
    )


FAULTS = (
    ResumeFault(
        "epoch 0's order replayed",
        SCHEDULE,
        PARTS,
        parts_of("0 if first else epoch, number"),
        ("rows", "indices"),
        "order_of_another_epoch",
    ),
    ResumeFault(
        "off by one batch: one left out",
        SCHEDULE,
        PARTS,
        parts_of("*divmod(step + bool(first), self.steps_per_epoch)"),
        ("rows", "indices"),
        "batch_read_too_early",
        trainparity="data cursor",
    ),
    ResumeFault(
        "off by one batch: one trained twice",
        SCHEDULE,
        PARTS,
        parts_of("*divmod(step - bool(first), self.steps_per_epoch)"),
        ("rows", "indices"),
        "batch_trained_again",
        trainparity="data cursor",
    ),
    ResumeFault(
        "the position inside the epoch lost",
        SCHEDULE,
        PARTS,
        parts_of("*divmod(step - first % self.steps_per_epoch, self.steps_per_epoch)"),
        ("rows", "indices"),
        "epoch_begins_anew",
    ),
    ResumeFault(
        "the workers' prefetched batches lost",
        RUN,
        "self.steps, first=self.count.first",
        "self.steps, first=self.count.first + 2 * bool(self.count.first)",
        ("rows",),
        "step_without_rows",
    ),
    ResumeFault(
        "augmentation of epoch 0 replayed",
        SCHEDULE,
        PARTS,
        parts_of("epoch, number", "0 if first else epoch"),
        ("tensors received",),
        "augmentation_of_another_epoch",
        trainparity="Python and NumPy RNG",
    ),
    ResumeFault(
        "random stream counted from the interruption",
        RUN,
        "        job = self._forward.begin(micro_batch, ",
        "        from dataclasses import replace\n\n"
        "        job = self._forward.begin(replace(micro_batch, step=micro_batch.step - self.count.first), ",
        ("loss",),
        "loss_with_other_random_numbers_after_loading",
        job="stateful",
        trainparity="CPU and CUDA RNG",
    ),
)
