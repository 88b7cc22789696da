"""Chooses how many rows a step of the proof takes: the job's, or fewer where a step of the whole batch is costly."""

from __future__ import annotations

from samestep.data.schedule import schedule_of
from samestep.job import Job

CHEAP_FLOP = 0.25e9  # of a step: some 0.1 s in float64 on one core
COSTLY_FLOP = 20e9
OF_PARAMETER = 2500  # what updating, shaking and comparing a parameter takes, as so many FLOP
BACKWARD = 3  # a forward and a backward pass cost about three forward passes


def rows_of_proof(job: Job, replicas: int, forward_flop: float, parameters: int) -> tuple[int, bool]:
    """Returns the rows of a step of the proof, 0 for the job's global batch, and whether such a step is costly.

    forward_flop: of one row's forward pass. Every replica gets two rows or more in each of its micro-batches, also of
    the uneven last batch.
    """
    of_row, of_model = BACKWARD * forward_flop, OF_PARAMETER * parameters
    micro_batches = replicas * schedule_of(job, replicas).micro_batches
    fewest = micro_batches * (3 if micro_batches == replicas else 4)
    affordable = int(CHEAP_FLOP / of_row) // micro_batches * micro_batches if of_row else job.global_batch
    rows = max(fewest, affordable)
    if rows >= job.global_batch:
        return 0, of_row * job.global_batch + of_model > COSTLY_FLOP
    return rows, of_row * rows + of_model > COSTLY_FLOP
