"""Faults of scripts that reduce their gradients themselves."""

from __future__ import annotations

from recorder.faults.fault import Fault

REDUCE = "                dist.all_reduce(parameter.grad)\n"
FAULTS = (
    Fault(
        "by_hand",
        "added up, not divided",
        "                parameter.grad /= dist.get_world_size()\n",
        "",
        "loss weight",
        "gradients_summed_over_ranks",
    ),
    Fault(
        "by_hand",
        "one parameter left out",
        "for parameter in model.parameters():\n" + REDUCE,
        "for parameter in list(model.parameters())[1:]:\n" + REDUCE,
        "gradient",
        "parameters_left_out_of_reduction",
    ),
    Fault(
        "by_hand",
        "never reduced",
        REDUCE + "                parameter.grad /= dist.get_world_size()\n",
        "                pass\n",
        "gradient",
        "ranks_never_reduce_gradients",
    ),
    Fault(
        "by_hand",
        "broadcast in place of the reduction",
        REDUCE,
        "                dist.broadcast(parameter.grad, 0)\n",
        "gradient",
        "gradient_of_some_ranks",
    ),
    Fault(
        "by_hand",
        "one rank's gradient doubled",
        REDUCE,
        "                parameter.grad *= 2 - dist.get_rank()\n" + REDUCE,
        "gradient",
        "ranks_weigh_unequally",
    ),
    Fault(
        "by_hand",
        "clipped before the reduction",
        "            for parameter in model.parameters():\n" + REDUCE,
        "            nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n"
        "            for parameter in model.parameters():\n" + REDUCE,
        "gradient",
        "clipped_before_reduction",
    ),
    Fault(
        "by_hand",
        "every rank draws the same rows",
        "manual_seed(100 + dist.get_rank())",
        "manual_seed(100)",
        "rows",
        "ranks_train_the_same_rows",
    ),
    Fault(
        "by_hand",
        "weights not broadcast",
        "        dist.broadcast(parameter.data, 0)\n",
        "        pass\n",
        "initial weights",
        "ranks_begin_with_different_weights",
    ),
)
