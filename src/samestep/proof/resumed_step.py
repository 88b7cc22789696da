"""Names the step whose rows or rates a resumed training has taken in place of its own."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from samestep.bounds import RATE_APART
from samestep.message import Message, message


def why_other_rows(step: int, same: Collection[int], epochs: Mapping[int, int | None]) -> Message:
    """Returns why a resumed training reads other rows in a step than the unbroken one.

    same: the steps of the unbroken training that read these rows. epochs: step -> its epoch; None: not known.
    """
    if not same:
        return message("epochs_order_not_restored")
    if step - 1 in same:
        return message("batch_trained_again", step=step - 1)
    if step + 1 in same:
        return message("batch_read_too_early", step=step + 1)
    read, epoch = min(same), epochs[step]
    begins = min(number for number, of_step in epochs.items() if of_step == epoch)
    if epoch is not None and begins in same:
        return message("epoch_begins_anew", epoch=epoch)
    found = epochs[read]
    if found is not None and epoch is not None and found != epoch:
        return message("order_of_another_epoch", step=read, found=found, expected=epoch)
    return message("place_in_the_data_not_restored", step=read)


def why_other_rates(step: int, found: Sequence[float], rates: Sequence[Sequence[float]]) -> Message:
    """Returns why a resumed training has other learning rates in a step than the unbroken one.

    found: the resumed training's. rates: of each step of the unbroken one.
    """
    if step + 1 < len(rates) and same_rates(rates[step + 1], found):
        return message("schedule_one_step_ahead")
    if step > 1 and same_rates(rates[0], found):
        return message("rate_begins_anew")
    if step and same_rates(rates[step - 1], found):
        return message("schedule_one_step_behind")
    return message("schedule_not_restored")


def same_rates(first: Sequence[float], second: Sequence[float]) -> bool:
    """Returns whether two steps are taken at the same rates."""
    return len(first) == len(second) and all(math.isclose(*pair, rel_tol=RATE_APART) for pair in zip(first, second))
