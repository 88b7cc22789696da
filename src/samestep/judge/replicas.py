"""Judges ranks that share out one model: the ranks of a replica as pieces of one process, and the replicas as the ranks
of any data-parallel training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from samestep.bounds import TOLD_APART, ZERO_GRADIENT
from samestep.judge.assembled import ReplicaRecord
from samestep.judge.copies import Copies, copies_apart, copies_drift_apart
from samestep.judge.findings import Ranks, common_steps, differs
from samestep.judge.fit import Array, norm
from samestep.judge.gradient_comparison import GradientComparison
from samestep.judge.gradients import UNEXPLAINED
from samestep.judge.layout import TensorLayout
from samestep.judge.rows import other_rows_within
from samestep.judge.step_gradients import StepGradients, reduced_apart
from samestep.message import Message, message
from samestep.records.findings import Finding
from samestep.records.script import BUCKETS, STEP, TAKEN, ScriptRecord, of_kind

# Findings of the replay about a gradient that is not one process's, where it knows no mistake of data parallelism.
NO_ONE_PROCESS = (
    "loss_depends_on_ranks",
    "loss_is_scaled",
    "gathered_gradient_incomplete",
    "mean_of_rank_means_or_a_term",
    "later_gradients_apart",
)
ONE_RANK = "one_rank"


def within_replicas(ranks: Ranks, layout: TensorLayout, record: ReplicaRecord) -> list[Finding]:
    """Returns what is wrong within a replica, one finding of a question; none where nothing is."""
    if all(len(replica) == 1 for replica in layout.replicas):
        return []
    checks = (_rows, _initial_weights, _gradients, _weights)
    findings = [finding for check in checks if (finding := check(ranks, layout, record))]
    drawn = [finding for finding in findings if finding.message.id == "replica_draws_apart"]
    return [*findings, *(replace(finding, question="random numbers") for finding in drawn)]


def with_replicas(finding: Finding, ranks: Ranks, layout: TensorLayout) -> Finding:
    """Returns an answer about replicas; about their rows with what was seen within each of them."""
    if finding.message.id == ONE_RANK and finding.question != "rows":
        return replace(finding, message=message("one_replica"))
    if finding.answer != "right" or not layout.tensor or finding.question != "rows":
        return finding
    between = finding.message if len(layout.replicas) > 1 else None
    said = message("replica_reads_one_batch", axis=layout.axis, between=between)
    if ranks[0].divides_inputs:
        said = message("replica_reads_pieces", axis=layout.axis, between=between)
    return replace(finding, message=said)


def _rows(ranks: Ranks, layout: TensorLayout, record: ReplicaRecord) -> Finding | None:
    """Finds ranks of one replica that read other rows: each then computes its piece of another batch."""
    for step in common_steps(ranks):
        for replica in layout.replicas:
            if ranks[replica[0]].divides_inputs:
                continue
            batches = [[batch.rows for batch in ranks[rank].steps[step].micro_batches] for rank in replica]
            apart = [rank for rank, of_rank in zip(replica, batches) if of_rank != batches[0]]
            if apart:
                axes = {"axis": layout.axis, "data_axis": layout.data_axis}
                return other_rows_within(replica, apart[0], replicas=len(layout.replicas), step=step, **axes)
    return None


# Tensors that several ranks of a replica hold


def _copies(ranks: Ranks, layout: TensorLayout) -> Iterator[Copies]:
    """Yields the copies of a parameter, or of a piece of it, that ranks of one replica hold."""
    for replica in layout.replicas:
        for name in ranks[replica[0]].start:
            held = defaultdict[tuple[int, ...], list[tuple[int, str]]](list)
            for rank in replica:
                piece = ranks[rank].pieces.get(name)
                held[tuple(piece.offset) + tuple(piece.shape) if piece else ()].append((rank, name))
            yield from (Copies(name, holders) for holders in held.values() if len(holders) > 1)


def _initial_weights(ranks: Ranks, layout: TensorLayout, record: ReplicaRecord) -> Finding | None:
    apart = copies_apart([*_copies(ranks, layout)], ranks, step=None)
    if apart is None:
        return None
    fields = {"axis": layout.axis, "different": apart.different, "plan": "parallelize_module"}
    return apart.finding(message("replica_begins_apart", **fields), along=layout.axis)


def _weights(ranks: Ranks, layout: TensorLayout, record: ReplicaRecord) -> Finding | None:
    apart = copies_drift_apart([*_copies(ranks, layout)], ranks)
    if apart is None:
        return None
    return apart.finding(message("replica_drifts_apart", axis=layout.axis), along=layout.axis)


def _gradients(ranks: Ranks, layout: TensorLayout, record: ReplicaRecord) -> Finding | None:
    """Finds a gradient that several ranks of a replica hold, and that is another one on them."""
    copies = [*_copies(ranks, layout)]
    for step in common_steps(ranks):
        taken = [of_kind(record.of_rank(STEP.format(step), rank.rank), TAKEN) for rank in ranks]
        largest = max((norm(array) for of_rank in taken for array in of_rank.values()), default=0.0)
        close = reduced_apart(ranks[0].steps[step].dtypes)
        apart = list[tuple[str, int]]()
        for same in copies:
            (first, name), *other_holders = same.holders
            for number, _ in other_holders:
                pair = [taken[rank].get(name) for rank in (first, number)]
                if _is_whole(ranks[number], name) and _differ(pair, close, largest):
                    apart.append((name, number))
        if not apart:
            continue
        name, rank = apart[0]
        known = local_norms(ranks, layout, record, step) or _draw_apart(ranks, layout, step)
        different = len({name for name, _ in apart})
        cause = known or message("replica_gradient_apart", axis=layout.axis, different=different)
        replica = next(replica for replica in layout.replicas if rank in replica)
        norms = [norm(taken[number][name]) if name in taken[number] else 0.0 for number in (replica[0], rank)]
        return differs(
            "gradient",
            f"gradient along {layout.axis}",
            cause,
            step=step,
            tensor=name,
            rank=rank,
            expected=message("a_norm", norm=norms[0]),
            found=message("a_norm", norm=norms[1]),
        )
    return None


def _is_whole(rank: ScriptRecord, name: str) -> bool:
    """Returns whether a gradient is one that is not still to be added up."""
    piece = rank.pieces.get(TAKEN.format(name))
    return piece is None or "partial" not in piece.kinds


def _differ(pair: Sequence[Array | None], close: float, largest: float) -> bool:
    first, second = pair
    if first is None or second is None:
        return (first is None) != (second is None)
    return norm(first - second) > close * max(norm(first), norm(second), ZERO_GRADIENT / close * largest)


def _draw_apart(ranks: Ranks, layout: TensorLayout, step: int) -> Message | None:
    """Returns that the ranks of a replica draw other random numbers in a step that makes of the same rows other
    gradients of what each of them computes whole. Where they draw for pieces, they may."""
    for replica in layout.replicas:
        states = {_state(ranks[rank], step) for rank in replica}
        if len(states) > 1 and "" not in states:
            return message("replica_draws_apart", axis=layout.axis, step=step)
    return None


def _state(rank: ScriptRecord, step: int) -> str:
    return rank.randoms.draws[step] if len(rank.randoms.draws) > step else ""


# Gradients that are no mean over replicas


def of_layout(finding: Finding, ranks: Ranks, layout: TensorLayout, record: ReplicaRecord, replicas: Ranks) -> Finding:
    """Returns a finding about replicas with their axis; of a gradient that is no mean over them with a cause that lies
    in the layout."""
    divergence = finding.divergence
    if divergence is None:
        return finding
    cause = finding.message
    if cause.id in UNEXPLAINED and divergence.step is not None:
        known = local_norms(ranks, layout, record, divergence.step)
        known = (
            known
            or _some_axes(record, replicas, divergence.step)
            or _added_up(layout, record, replicas, divergence.step)
        )
        cause = known or cause
    elif cause.id == "ranks_train_the_same_rows":
        cause = message("replicas_train_the_same_rows", axis=layout.data_axis, replicas=len(layout.replicas))
    if len(layout.replicas) > 1:
        divergence = replace(divergence, quantity=f"{divergence.quantity} along {layout.data_axis}")
    return replace(finding, message=cause, divergence=replace(divergence, cause=cause))


def local_norms(ranks: Ranks, layout: TensorLayout, record: ReplicaRecord, step: int) -> Message | None:
    """Returns that each rank has scaled its pieces by a factor of its own, as by the norm of these pieces alone."""
    gradients = StepGradients.read(record, [ranks[number] for number in layout.representatives], step)
    means = gradients.as_mean().reduced[0]
    found, wanted = dict[int, dict[str, Array]](), dict[int, dict[str, Array]]()
    for rank in ranks:
        taken = of_kind(record.of_rank(STEP.format(step), rank.rank), TAKEN)
        known = {name: taken[name] for name in means if name in taken and taken[name].size < BUCKETS}
        found[rank.rank] = {name: array for name, array in known.items() if array.any()}
        wanted[rank.rank] = {name: np.where(array != 0, means[name], 0.0) for name, array in found[rank.rank].items()}
    factors = GradientComparison(found, wanted).factors_of_ranks()
    if not factors or min(factors) <= 0 or max(factors) - min(factors) <= TOLD_APART * max(factors):
        return None
    return message(
        "clipped_by_local_norms", axis=layout.axis or layout.data_axis, factors=[round(f, 4) for f in factors]
    )


def _some_axes(record: ReplicaRecord, replicas: Ranks, step: int) -> Message | None:
    """Returns that gradients are reduced over some of the replicas: along some axes of the mesh, and not the others."""
    gradients = StepGradients.read(record, replicas, step)
    axes: dict[str, list[int]] = {}
    for index, name in gradients.not_mean:
        rank = replicas[index]
        piece = rank.pieces.get(name)
        if piece is None:
            return None
        mesh = rank.meshes[piece.mesh]
        members = [number for number, replica in enumerate(replicas) if replica.rank in mesh.ranks]
        parts = [sum(gradients.local[number][name], np.zeros(1)) for number in members]
        mean = np.sum(parts, axis=0) / len(members)
        if len(members) == len(replicas) or norm(gradients.reduced[index][name] - mean) > TOLD_APART * norm(mean):
            return None
        axes[" x ".join(mesh.names)] = [replicas[number].rank for number in members]
    if not axes:
        return None
    axis, numbers = next(iter(axes.items()))
    return message("reduced_along_some_axes", axis=axis, ranks=numbers, replicas=len(replicas))


def of_one_replica(
    finding: Finding,
    layout: TensorLayout,
    told_ranks: int,
    cause_of: Callable[[int], Message | None] = lambda step: None,
) -> Finding:
    """Returns an answer of the replay; where the cause may lie in how a replica's ranks compute together, with that.

    told_ranks: how many ranks the one process was told of. Where that is the recording's number, a loss or a rate that
    depends on it is the same. cause_of: returns a mistake within a replica that explains a step's gradient.
    """
    divergence, said = finding.divergence, finding.message
    if told_ranks > 1 and len(layout.replicas) == 1 and finding.answer == "right":
        return Finding(finding.question, "unknown", message("replay_told_of_all_ranks", ranks=told_ranks))
    if divergence is None:
        return finding
    within = layout.tensor and finding.question == "replayed gradient" and divergence.step is not None
    if within and said.id in NO_ONE_PROCESS and (known := cause_of(divergence.step or 0)):
        said = known
        divergence = replace(divergence, quantity=f"{divergence.quantity}, along {layout.axis}")
    elif layout.tensor and said.id in ("loss_depends_on_ranks", "loss_is_scaled"):
        said = message("replica_is_no_one_process", axis=layout.axis, factor=said.fields.get("factor"), told=None)
        divergence = replace(divergence, quantity=f"{divergence.quantity}, along {layout.axis}")
    if told_ranks > 1:
        said = replace(said, fields={**said.fields, "told": told_ranks})
    return replace(finding, message=said, divergence=replace(divergence, cause=said))


def _added_up(layout: TensorLayout, record: ReplicaRecord, replicas: Ranks, step: int) -> Message | None:
    """Returns that gradients which each rank of a replica has whole are added up over these ranks."""
    gradients, size = StepGradients.read(record, replicas, step), len(layout.replicas[0])
    for index, name in gradients.not_mean:
        mean = gradients.as_mean().reduced[index][name]
        if size < 2 or norm(gradients.reduced[index][name] - size * mean) > TOLD_APART * size * norm(mean):
            return None
    names = {name for _, name in gradients.not_mean}
    return message("whole_gradients_added_up", axis=layout.axis, ranks=size, parameters=len(names))
