"""Faults beside the steps: of the evaluation and of the collectives."""

from __future__ import annotations

from recorder.faults import Fault

OWN = "DataLoader(Subset(held_out, range(rank, len(held_out), size)), batch_size=4)"
SHARED = "DataLoader(held_out, batch_size=4, sampler=DistributedSampler(held_out, shuffle=False))"
BESIDE_FAULTS = (
    Fault("evaluates", "evaluation padded by its sampler", OWN, SHARED, "evaluation", "evaluated_rows_counted_twice"),
    Fault(
        "evaluates",
        "evaluation of a rank's share taken for the whole",
        OWN,
        SHARED.replace("(held_out, shuffle=False)", "(held_out, size, 0, shuffle=False)"),
        "evaluation",
        "rows_evaluated_by_no_rank",
    ),
    Fault(
        "evaluates",
        "collectives in another order on rank 1",
        "for name in found:",
        "for name in sorted(found, reverse=rank == 1):",
        "collectives",
        "collectives_in_another_order",
    ),
)
