"""Names the mistake of ranks of a replica that do not compute what one process does: each mistake is tried against its
gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from samestep.bounds import LOSS_APART_IN_REPLICA, QUOTIENTS_TOLD_APART, TOLD_APART
from samestep.judge.assembled import ReplicaRecord
from samestep.judge.findings import Ranks
from samestep.judge.fit import Array, multiple_of, norm
from samestep.judge.layout import TensorLayout
from samestep.judge.losses import losses_of
from samestep.judge.step_gradients import StepGradients, before_clipping, norm_of_all
from samestep.message import Message, message
from samestep.records.record import Record
from samestep.records.script import STEP
from samestep.records.script_plan import ReplayRecord


def cause_within_replica(
    ranks: Ranks,
    replicas: Ranks,
    layout: TensorLayout,
    record: ReplicaRecord,
    replay: Record,
    result: ReplayRecord,
    step: int,
) -> Message | None:
    """Returns the mistake that explains the gradient of a step; None where none of those that are tried does.

    ranks: all. replicas: one record of each replica, whose arrays are in `record`. replay: those of one process.
    """
    gradients = StepGradients.read(record, replicas, step)
    replayed = before_clipping(replay.arrays(STEP.format(step)))
    names = [name for name in gradients.names if name in replayed]
    recorded = gradients.reduced[0]
    if factor := _by_norm_of_copies(ranks, layout, names, recorded, replayed):
        return message("clipped_by_norm_of_copies", axis=layout.axis, factor=round(factor, 4))
    if losses := _losses_apart(ranks, layout, step):
        return message("replica_losses_apart", axis=layout.axis, losses=losses)
    if result.lone_log_softmax:
        return message("log_softmax_alone_in_loss_parallel")
    if left := _elements_without_gradient(names, recorded, replayed):
        name, count = left
        return message("elements_without_gradient", axis=layout.axis, parameter=name, elements=count)
    return None


def _by_norm_of_copies(
    ranks: Ranks,
    layout: TensorLayout,
    names: Sequence[str],
    recorded: Mapping[str, Array],
    replayed: Mapping[str, Array],
) -> float | None:
    """Returns the factor of the ranks' gradient, where it is that of a norm in which what each rank of a replica holds
    whole counts once a rank."""
    size = len(layout.replicas[0])
    together = np.concatenate([replayed[name] for name in names]) if names else np.zeros(1)
    found = np.concatenate([recorded[name] for name in names]) if names else np.zeros(1)
    factor, left = multiple_of(found, together)
    if factor <= 0 or left > TOLD_APART * norm(found):
        return None
    copies = [name for name in names if (piece := ranks[0].pieces.get(name)) is None or "shard" not in piece.kinds]
    of_copies = norm_of_all(replayed, copies)
    right, wrong = norm(together), math.hypot(norm(together), math.sqrt(size - 1) * of_copies)
    is_told_apart = abs(factor - 1) > QUOTIENTS_TOLD_APART and 0 < len(copies) < len(names)
    return factor if is_told_apart and abs(factor * wrong / right - 1) <= TOLD_APART else None


def _losses_apart(ranks: Ranks, layout: TensorLayout, step: int) -> list[float]:
    """Returns the losses of the ranks of a replica which have other ones of the same rows; [] where none has."""
    losses = losses_of(ranks, step)
    for replica in layout.replicas:
        known = [value for rank in replica if (value := losses[rank]) is not None]
        reads_same = not any(ranks[rank].divides_inputs for rank in replica)
        if (
            reads_same
            and len(known) == len(replica)
            and max(known) - min(known) > LOSS_APART_IN_REPLICA * max(map(abs, known))
        ):
            return [float(f"{value:.6g}") for value in known]
    return []


def _elements_without_gradient(
    names: Sequence[str], recorded: Mapping[str, Array], replayed: Mapping[str, Array]
) -> tuple[str, int] | None:
    """Returns (parameter, how many of its elements have no gradient on the ranks and one in one process), where that is
    all that differs."""
    found = []
    size = norm_of_all(replayed, names)
    for name in names:
        left = (recorded[name] == 0) & (np.abs(replayed[name]) > TOLD_APART * size / max(1, replayed[name].size))
        if norm(np.where(left, 0.0, recorded[name] - replayed[name])) > TOLD_APART * norm(replayed[name]):
            return None
        if left.any():
            found.append((name, int(left.sum())))
    return found[0] if found else None
