"""The step before which a training of the proof is interrupted: drawn, and the same in every process."""

from __future__ import annotations

import hashlib

INTERRUPTED = ("sgd", "user")  # of the proof's trainings; 'gradient' has one step


def interruption(seed: int, training: str, steps: int, per_epoch: int, *, only_at_end: bool = False) -> int:
    """Returns the number of steps before a training of `steps` steps is interrupted, between 1 and steps - 1.

    One of the two trainings is interrupted at an epoch's end, where it has one, and the other one in an epoch; `seed`
    decides which. per_epoch: steps of an epoch. only_at_end: both at an epoch's end.
    """
    at_end = [step for step in range(1, steps) if step % per_epoch == 0]
    within = [step for step in range(1, steps) if step % per_epoch]
    ends_epoch = only_at_end or (seed + INTERRUPTED.index(training)) % 2 == 1
    drawn_from = (at_end if ends_epoch else within) or at_end or within
    digest = hashlib.blake2b(f"{seed}/interruption/{training}".encode(), digest_size=8).digest()
    return drawn_from[int.from_bytes(digest, "big") % len(drawn_from)]
