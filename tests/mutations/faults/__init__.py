"""The faults: each a patch of a real file of samestep, the quantities that rightly name it, and the ids of its cause.

`old` must stand in the file, once; a patch that does not apply fails. `jobs`: where the fault can act at all.
`needs`: what a job must have for it, said so that nobody wonders why the others are left out.
`engine`, `settings`: what is proven with the patch in it.
"""

from __future__ import annotations

from mutations.faults import (
    engine_loops,
    engines,
    late,
    loop,
    numerics,
    one_process,
    own_dtype,
    rows_and_evaluation,
    run,
    shared,
    steps,
    users,
)
from mutations.faults.fault import ALL, DDP, Fault

__all__ = ["ALL", "DDP", "FAULTS", "Fault"]
FAULTS = (
    *loop.FAULTS,
    *rows_and_evaluation.FAULTS,
    *engines.FAULTS,
    *engine_loops.FAULTS,
    *numerics.FAULTS,
    *steps.FAULTS,
    *shared.FAULTS,
    *late.FAULTS,
    *own_dtype.FAULTS,
    *run.FAULTS,
    *one_process.FAULTS,
    *users.FAULTS,
)  # in the order of the table
