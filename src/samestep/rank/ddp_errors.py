"""What DistributedDataParallel's errors mean, for the engines that wrap the model in it."""

from __future__ import annotations

import re

from samestep.job import Job


def explain(error: BaseException, job: Job) -> str | None:
    """A sentence about parameters that got no gradient, named where DDP numbers them; None for other errors."""
    if "finished reduction in the prior iteration" not in str(error):
        return None
    names = [name for name, parameter in job.model().named_parameters() if parameter.requires_grad]
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    unused = ", ".join(names[int(number)] for number in numbers[1].split()[:4]) if numbers else "some parameters"
    return f"{unused}: no gradient in a step; freeze such parameters, or leave them out"
