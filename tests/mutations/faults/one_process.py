"""Faults of the weights that a batch decides (Job.batch_weight), which all ranks sum once a step."""

from __future__ import annotations

from mutations.faults.fault import EVALUATE, STEP, Fault

REDUCED = "        dist.all_reduce(total)\n    total_weight = float(total)\n"
SHARE = "        share = weight * world.size / total_weight if total_weight else 0.0\n"
NEEDS = "weights of batches"
JOBS = ("masked",)

FAULTS = (
    Fault(
        "batch weights: the total of the rank alone",
        STEP,
        REDUCED,
        "    total_weight = float(total)\n",
        ("first gradient",),
        "part_of_gradient_missing_or_repeated",
        JOBS,
        NEEDS,
    ),
    Fault(
        "batch weights: the total averaged over the ranks",
        STEP,
        REDUCED,
        "        dist.all_reduce(total)\n    total_weight = float(total) / world.size\n",
        ("first gradient",),
        "gradients_summed_instead_of_averaged",
        JOBS,
        NEEDS,
    ),
    Fault(
        "batch weights: each micro-batch's own mean",
        STEP,
        SHARE,
        "        share = float(weight > 0) / len(step)\n",
        ("first gradient",),
        "micro_batches_weigh_alike",
        JOBS,
        NEEDS,
    ),
    Fault(
        "batch weights: the total of the step before",
        STEP,
        "    total_weight = float(total)\n",
        "    total_weight = float(total)\n"
        "    before, _weighed_step.before = getattr(_weighed_step, 'before', total_weight), total_weight\n"
        "    total_weight = before if step[0].micro_batch.step else total_weight\n",
        ("loss",),
        "update_wrong_at_one_step",
        JOBS,
        NEEDS,
    ),
    Fault(
        "batch weights: the rows' number instead",
        STEP,
        "    return weight\n\n\nclass ForwardPass",
        "    return float(batch.micro_batch.rows)\n\n\nclass ForwardPass",
        ("weight",),
        "weights_of_right_rows_differ",
        JOBS,
        NEEDS,
    ),
    Fault(
        "batch weights: an evaluation's rows weigh alike",
        EVALUATE,
        "weight=batch_weight(job, batch))",
        "weight=float(batch.micro_batch.rows))",
        ("evaluation rows", "evaluation"),
        "evaluation_weights_differ",
        JOBS,
        NEEDS,
    ),
)
