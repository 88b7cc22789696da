"""Explains DistributedDataParallel's errors, for the engines that wrap the model in it."""

from __future__ import annotations

import re

from samestep.job import Job

NO_GRADIENT = (
    "{}: no gradient in a step; freeze such parameters, leave them out, or use them in every batch, as in "
    "output + 0 * parameter.sum()"
)


def explain(error: BaseException, job: Job) -> str | None:
    """Returns a sentence about parameters without a gradient; None for other errors.

    It names them where DDP's message has their indices.
    """
    if "finished reduction in the prior iteration" not in str(error):
        return None
    names = [name for name, parameter in job.model().named_parameters() if parameter.requires_grad]
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    unused = ", ".join(names[int(number)] for number in numbers[1].split()[:4]) if numbers else "some parameters"
    return NO_GRADIENT.format(unused)
