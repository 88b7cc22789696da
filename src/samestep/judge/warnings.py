"""Mistakes that all ranks make in the same way, so that no two ranks differ, and different steps and modes of ranks."""

from __future__ import annotations

import math

import numpy as np

from samestep.bounds import CONSTANT_LOSS_APART, CONSTANT_LOSS_FROM
from samestep.judge.findings import Ranks, common_steps, differs
from samestep.message import message
from samestep.records.findings import Finding
from samestep.records.script import ScriptRecord

STILL = 0.5  # the share of elements that do not move, from which on there is a warning
FEWEST_STEPS = 4
RISES = 1.05


def warnings(ranks: Ranks) -> list[Finding]:
    """Returns the warnings about such mistakes; none where nothing is seen of them."""
    checks = (no_process_group, modes, gathers, ties, rounded_updates, constant_losses, forwards, rollouts)
    return [finding for check in checks if (finding := check(ranks))]


def no_process_group(ranks: Ranks) -> Finding | None:
    """Finds ranks none of which could tell another one anything: each trains by itself, as one process does."""
    if len(ranks) == 1 or any(rank.may_communicate for rank in ranks):
        return None
    cause = message("no_process_group", ranks=len(ranks))
    expected, found = message("group_of_all_ranks", ranks=len(ranks)), message("no_group_of_ranks")
    return differs("steps", "process group", cause, expected=expected, found=found)


def modes(ranks: Ranks) -> Finding | None:
    """Finds the first step that some ranks train in evaluation mode beside others, or that all do after steps in
    training mode.

    Where all do, one process would do the same: that is a warning. Ranks are compared that have the same layers.
    """
    for step in common_steps(ranks):
        for replicas in _replicas(ranks):
            of_ranks = {rank.rank: rank.steps[step].modes for rank in replicas}
            apart = {layer for modes in of_ranks.values() for layer in modes if modes[layer]}
            left = [rank for rank, modes in of_ranks.items() if any(not modes.get(layer, True) for layer in apart)]
            if left:
                said = message("left_in_evaluation_mode", ranks=left, step=step)
                training, evaluation = message("training_mode"), message("evaluation_mode")
                return differs("gradient", "mode", said, step=step, rank=left[0], expected=training, found=evaluation)
            if not apart and leaves_training_mode(replicas[0], step + 1):
                return Finding("gradient", "warning", message("left_in_evaluation_mode", ranks=[*of_ranks], step=step))
    return None


def _replicas(ranks: Ranks) -> list[list[ScriptRecord]]:
    """Returns the ranks whose models have the same parameters and layers, in groups."""
    groups: dict[str, list[ScriptRecord]] = {}
    for rank in ranks:
        layers = [sorted({name for step in rank.steps for name in step.modes}), sorted(rank.shapes.items())]
        groups.setdefault(repr(layers), []).append(rank)
    return [*groups.values()]


def leaves_training_mode(rank: ScriptRecord, steps: int | None = None) -> bool:
    """Returns whether a layer of a rank is trained in evaluation mode after a step in training mode. steps: of the
    first so many; None: of all."""
    trained: set[tuple[int, str]] = set()
    for step in rank.steps[:steps]:
        for layer, is_in_training_mode in step.modes.items():
            if not is_in_training_mode and (step.optimizer, layer) in trained:
                return True
            if is_in_training_mode:
                trained.add((step.optimizer, layer))
    return False


def gathers(ranks: Ranks) -> Finding | None:
    """Finds a loss over what was gathered from all ranks, of which only the rank's own part has a gradient.

    Ranks that read the same rows share out a model: each has the whole loss, and the gradient of its own part is whole.
    """
    for step in common_steps(ranks):
        if not all(rank.steps[step].cut_gathers for rank in ranks):
            continue
        rows = [tuple(row for batch in rank.steps[step].micro_batches for row in batch.rows) for rank in ranks]
        if not any(rows) or len({*rows}) == len(rows):
            return Finding("collectives", "warning", message("gather_without_gradient", step=step, ranks=len(ranks)))
    return None


def ties(ranks: Ranks) -> Finding | None:
    """Finds an embedding and an output layer that begin with the same values, and are trained apart."""
    first = ranks[0]
    for step in first.steps:
        for embedding, head in first.ties:
            if step.weights.get(embedding) != step.weights.get(head):
                return Finding("updates", "warning", message("tied_weight_comes_apart", embedding=embedding, head=head))
    return None


def rounded_updates(ranks: Ranks) -> Finding | None:
    """Finds 16-bit weights most of whose elements no step moves, at a rate that is not only warming up."""
    first = ranks[0]
    rates = [max(step.rates, default=0.0) for step in first.steps]
    rises = len(rates) < FEWEST_STEPS or rates[-1] > RISES * rates[0] or not rates[-1]
    if rises or first.still is None or first.still <= STILL:
        return None
    said = message("updates_lost_in_rounding", still=first.still, steps=len(rates), rate=rates[-1])
    return Finding("updates", "warning", said)


def constant_losses(ranks: Ranks) -> Finding | None:
    """Finds a loss that has one value in all micro-batches of all steps, of other rows, while the weights move: it
    compares a tensor with itself, as the loss of a policy does whose reference is the policy itself."""
    first = ranks[0]
    values = [batch.value for rank in ranks for step in rank.steps for batch in step.micro_batches]
    rows = {tuple(batch.rows) for step in first.steps for batch in step.micro_batches}
    moving = [step for step in first.steps if step.moved]
    if len(moving) < FEWEST_STEPS or len(rows) < FEWEST_STEPS or None in values:
        return None
    value = float(values[0] or 0.0)
    # 16 bits hold few values, and a loss of advantages whose mean is taken away is zero.
    if (
        _has_16_bits(value)
        or abs(value) < CONSTANT_LOSS_FROM
        or not all(math.isclose(value, v or 0.0, rel_tol=CONSTANT_LOSS_APART) for v in values)
    ):
        return None
    steps = len(first.steps)
    counts = [call.count for call in first.calls if call.call in ("evaluation", "frozen forward")]
    if max(counts, default=0) >= steps:
        return Finding("updates", "warning", message("reference_follows_policy", loss=value, steps=steps))
    return Finding("updates", "warning", message("loss_never_changes", loss=value, steps=steps))


def _has_16_bits(value: float) -> bool:
    """Returns whether a value is one of bfloat16's, or of float16's."""
    bits = int(np.float32(value).view(np.uint32))
    return bits & 0x1FFF == 0


def forwards(ranks: Ranks) -> Finding | None:
    """Finds a step for which a rank has computed more forward passes of its loader's batches than another."""
    for step in common_steps(ranks):
        micro_batches = [rank.steps[step].micro_batches for rank in ranks]
        counts = [sum(micro_batch.forwards for micro_batch in of_rank) for of_rank in micro_batches]
        read = all(micro_batch.passes for of_rank in micro_batches for micro_batch in of_rank)
        if read and len({*map(len, micro_batches)}) == 1 < len({*counts}):
            more = [rank for rank, count in enumerate(counts) if count > min(counts)]
            cause = message(
                "step_skipped_on_some_ranks", ranks=more, step=step, forwards=max(counts), fewer=min(counts)
            )
            return Finding("steps", "warning", cause)
    return None


def rollouts(ranks: Ranks) -> Finding | None:
    """Finds ranks that compute as many forward passes without gradients, in training mode, before different steps: one
    of them has left its loop earlier. Decisions for each row or episode make other numbers of forwards; an evaluation
    is in evaluation mode.
    """
    steps = common_steps(ranks)
    of_ranks = [{step: forwards for step, forwards in rank.rollouts if step in steps} for rank in ranks]
    counts = {forwards for of_rank in of_ranks for forwards in of_rank.values()}
    if not all(of_ranks) or len(counts) != 1 or counts == {1}:
        return None
    for rank, of_rank in enumerate(of_ranks):
        if apart := of_rank.keys() ^ of_ranks[0].keys():
            return Finding("steps", "warning", message("ranks_part_at_a_step", ranks=[0, rank], step=min(apart)))
    return None
