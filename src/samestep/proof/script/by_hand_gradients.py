"""Judges whether the gradients of ranks that share out a model are those of one process, and names the cause where
not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from samestep.bounds import (
    ABOVE_ZERO,
    FIRST_STEP_APART,
    LATER_STEPS_APART,
    LOSS_APART_OF_PIECES,
    ROUNDED_BY_OTHERS,
    TOLD_APART,
    ZERO_GRADIENT,
)
from samestep.message import Message, message
from samestep.proof.script.by_hand import Division, draw_apart
from samestep.proof.script.findings import Ranks, differs, module_name
from samestep.proof.script.first_module import first_module_apart
from samestep.proof.script.fit import Array, multiple_of, norm
from samestep.proof.script.losses import losses_of, same_loss
from samestep.proof.script.replay import GRADIENT, coarser_of, grown_rounding
from samestep.proof.script.step_gradients import norm_of_all
from samestep.records.findings import Finding, Question
from samestep.records.record import Record
from samestep.records.script import STEP, TAKEN, UNCLIPPED, ScriptRecord, of_kind
from samestep.records.torch_collectives import returns_without_history

Gradients = dict[int, dict[str, Array]]  # rank -> parameter -> its gradient there


@dataclass(frozen=True)
class Compared:
    """The gradients of one step on the ranks, and in one process. apart: (rank, parameter) of each gradient that
    differs."""

    division: Division
    recorded: Gradients
    wanted: Gradients
    apart: list[tuple[int, str]]
    distance: float

    @classmethod
    def of(
        cls, division: Division, recorded: Gradients, wanted: Gradients, *, bound: float, rounding: float
    ) -> Compared:
        sizes = [norm_of_all(of_rank, [*of_rank]) for of_rank in wanted.values()]
        size = max(filter(math.isfinite, sizes), default=0.0)
        # A bias of attention's keys has no effect: its gradient is rounding of zero.
        wanted = {
            rank: {
                name: array
                for name, array in of_rank.items()
                if not sum(_norms(name, of_rank, recorded[rank])) <= rounding * size
            }
            for rank, of_rank in wanted.items()
        }
        distances = {}
        for rank, of_rank in wanted.items():
            for name, gradient in of_rank.items():
                held = recorded[rank].get(name, np.zeros_like(gradient))
                # The rank has no gradient of an expert that no row has chosen: it counts as zeros.
                if held.shape == gradient.shape:
                    distances[rank, name] = norm(held - gradient) / max(
                        norm(gradient), ROUNDED_BY_OTHERS * size, ABOVE_ZERO
                    )
        apart = [pair for pair, distance in distances.items() if not distance <= bound]
        return cls(division, recorded, wanted, apart, max(distances.values(), default=0.0))

    def not_finite(self, step: int) -> Message | None:
        """Returns which gradient is NaN or infinite, in one process or of a rank; None where all are finite."""
        for rank, of_rank in self.wanted.items():
            for name in of_rank:
                in_one_process, held = _norms(name, of_rank, self.recorded[rank])
                if not math.isfinite(in_one_process):
                    return message("replayed_gradient_not_finite", parameter=name, step=step)
                if not math.isfinite(held):
                    return message("gradient_of_rank_not_finite", parameter=name, rank=rank, step=step)
        return None

    def factor(self, rank: int, name: str) -> float | None:
        """Returns by how much a gradient is one process's multiplied; None where it is no multiple of it."""
        wanted, held = self.wanted[rank][name], self.recorded[rank].get(name)
        if held is None or not wanted.any():
            return None
        factor, left = multiple_of(held, wanted)
        return factor if left <= TOLD_APART * abs(factor) * norm(wanted) else None

    def common_factor(self) -> float | None:
        """Returns the factor that all gradients have which are apart; None where they have none in common."""
        factors = [self.factor(*pair) for pair in self.apart]
        known = [factor for factor in factors if factor is not None]
        if len(known) < len(factors) or max(known) - min(known) > TOLD_APART * max(map(abs, known)):
            return None
        return float(np.median(known))

    def is_combined(self, name: str, ranks: list[int], divided_by: float) -> bool:
        """Returns whether the gradients that some ranks have of a parameter are together one process's."""
        parts = [self.recorded[rank][name] for rank in ranks if name in self.recorded[rank]]
        if len(parts) < len(ranks):
            return False
        wanted, first = self.wanted[ranks[0]][name], parts[0]
        together: Array = np.sum(parts, axis=0) / divided_by
        # Where the parts are equal, their sum is one of them times a factor.
        unequal = any(norm(part - first) > TOLD_APART * norm(first) for part in parts)
        return unequal and norm(together - wanted) <= TOLD_APART * norm(wanted)

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self.apart))

    @property
    def all_names(self) -> list[str]:
        return list(dict.fromkeys(name for of_rank in self.wanted.values() for name in of_rank))


def _norms(name: str, *gradients: Mapping[str, Array]) -> list[float]:
    return [norm(of_rank[name]) if name in of_rank else 0.0 for of_rank in gradients]


def replayed_gradients(
    division: Division,
    ranks: Ranks,
    one_process: ScriptRecord,
    *,
    record: Record,
    replay: Record,
    told_ranks: int,
    gathers_cut: bool = False,
) -> list[Finding]:
    """Compares the gradients of each step, until one is another one; answers 'replayed gradient' and 'clipping'.

    gathers_cut: whether the ranks gather what has a gradient by collectives that hand none back.
    """
    first, distances = 0.0, list[float]()
    is_clipped = False
    for step in range(len(one_process.steps)):
        coarser = coarser_of(ranks)
        bound, rounding = (LATER_STEPS_APART if step else FIRST_STEP_APART) * coarser, ZERO_GRADIENT * coarser
        pairs = [_arrays(division, ranks, record, replay, step, kinds) for kinds in ((TAKEN, UNCLIPPED), (TAKEN,))]
        before, after = (Compared.of(division, *pair, bound=bound, rounding=rounding) for pair in pairs)
        if broken := before.not_finite(step) or after.not_finite(step):
            return [Finding(GRADIENT, "unknown", broken)]
        if step == 0 and (finding := _cut_off(before, ranks)):
            return [finding]
        distances.append(before.distance)
        first = first or before.distance
        is_clipped = is_clipped or any(rank.steps[step].clips for rank in ranks)
        compared, cause = before, None
        if before.apart and (grown := grown_rounding(distances, step)):
            return [grown]
        if before.apart:
            cause = _cause(before, ranks, one_process, step=step, told_ranks=told_ranks, gathers_cut=gathers_cut)
        elif after.apart:
            compared, cause = after, _clipped_otherwise(after)
        if cause is None:
            continue
        question: Question = GRADIENT if compared is before else "clipping"
        if cause.id in UNKNOWN:
            return [Finding(GRADIENT, "unknown", cause)]
        rank, name = _first_apart(compared, cause)
        wanted, held = compared.wanted[rank][name], compared.recorded[rank].get(name)
        quantity = f"gradient against one process, along {cause.fields.get('axis') or division.axis}"
        found = message("a_norm", norm=norm(held)) if held is not None else message("a_norm", norm=0.0)
        finding = differs(
            question,
            quantity,
            cause,
            step=step,
            tensor=name,
            rank=rank,
            expected=message("a_norm", norm=norm(wanted)),
            found=found,
        )
        return [finding]
    fed = message("fed_as_one")
    size_told = told_ranks if told_ranks == len(ranks) else None
    said = message("gradient_of_one_process", distance=first, fed=fed, means=None, told=size_told)
    right = Finding(GRADIENT, "right", said)
    steps = len(one_process.steps)
    said = message("clipped_once_a_step", steps=steps) if is_clipped else message("nothing_is_clipped")
    return [right, Finding("clipping", "right", said)]


UNKNOWN = ("whole_weights_give_another_loss", "replay_told_of_all_ranks")


def _arrays(
    division: Division, ranks: Ranks, record: Record, replay: Record, step: int, kinds: tuple[str, ...]
) -> tuple[Gradients, Gradients]:
    """Returns the gradients of a step as the ranks have them, and as one process has them. kinds: those that come last
    count."""
    replayed: Mapping[str, Array] = replay.arrays(STEP.format(step))
    one_process = {key: array for kind in kinds for key, array in of_kind(replayed, kind).items()}
    recorded, wanted = Gradients(), Gradients()
    for rank in ranks:
        arrays = record.arrays(STEP.format(step), rank.rank)
        recorded[rank.rank] = {name: array for kind in kinds for name, array in of_kind(arrays, kind).items()}
        prefix = f"rank {division.layout.like(rank.rank)}: "
        held = {key.removeprefix(prefix): array for key, array in one_process.items() if key.startswith(prefix)}
        wanted[rank.rank] = held
    return recorded, wanted


def _first_apart(compared: Compared, cause: Message) -> tuple[int, str]:
    """Returns the rank and parameter that a finding names: where gradients have gone wrong on their way back, the one
    that is nearest to the fault."""
    if cause.id in ("gradient_incomplete_along_axis", "ranks_compute_otherwise"):
        last = compared.names[-1]
        return next(pair for pair in compared.apart if pair[1] == last)
    return compared.apart[0]


def _cause(
    compared: Compared, ranks: Ranks, one_process: ScriptRecord, *, step: int, told_ranks: int, gathers_cut: bool
) -> Message:
    """Returns why the ranks' gradients are not those of one process: first what was tried and explains them all."""
    division = compared.division
    layout, axis, size, replicas = division.layout, division.axis, division.layout.size, len(division.layout.replicas)
    if factor := compared.common_factor():
        return _scaled(compared, factor, told_ranks)
    if found := _not_reduced(compared):
        return found
    is_same_loss = same_loss(ranks, one_process, 0, LOSS_APART_OF_PIECES * coarser_of(ranks)) if step == 0 else None
    if is_same_loss is False:
        values = losses_of(ranks, 0)
        apart = any(values[replica[0]] != values[rank] for replica in layout.replicas for rank in replica)
        if layout.shares_rows and axis == "tensor" and apart and draw_apart(layout, ranks):
            return message("replica_draws_apart", axis=axis, step=0)
        if (module := first_module_apart(ranks, one_process)) is not None:
            return message("module_computes_otherwise", axis=axis, module=module_name(module), ranks=size)
        if any(pieces[0].dimension >= 0 for pieces in division.held.values()):
            return message("whole_weights_give_another_loss", axis=axis)
        return message("ranks_compute_otherwise", axis=axis, ranks=size, replicas=replicas)
    if local := _own_factors(compared):
        return message("clipped_by_local_norms", axis=axis, factors=local)
    if gathers_cut and is_same_loss:
        return message("gather_cuts_gradient")
    different = {name for rank, name in compared.apart if _differs_within(compared, rank, name)}
    if different:
        return message("gradient_incomplete_along_axis", axis=axis, parameter=compared.names[-1], ranks=size)
    return message("ranks_compute_otherwise", axis=axis, ranks=size, replicas=replicas)


def _differs_within(compared: Compared, rank: int, name: str) -> bool:
    """Returns whether ranks of a replica have another gradient of what each holds whole."""
    first = compared.recorded[rank].get(name)
    other_ranks = [
        other_rank for other_rank in compared.division.layout.replica_of(rank) if name in compared.wanted[other_rank]
    ]
    if first is None or compared.division.is_divided(name):
        return False
    arrays = [compared.recorded[other_rank].get(name) for other_rank in other_ranks]
    return any(array is not None and norm(array - first) > TOLD_APART * norm(first) for array in arrays)


def _scaled(compared: Compared, factor: float, told_ranks: int) -> Message:
    """Returns why some gradients are one process's times a factor."""
    division, names, count = compared.division, compared.names, len(compared.all_names)
    size, replicas = division.layout.size, len(division.layout.replicas)
    everything = len(compared.apart) == sum(len(of_rank) for of_rank in compared.wanted.values())
    if told_ranks > 1 and everything and _is(factor, told_ranks):
        return message("replay_told_of_all_ranks", ranks=told_ranks)
    sizes = {division.axis: size, "data": replicas, f"data x {division.axis}": size * replicas}
    axis = next((axis for axis, ranks in sizes.items() if ranks > 1 and _is(factor, ranks)), None)
    divided = [name in division.held and division.is_divided(name) for name in names]
    which = "all" if everything or len(names) == count else "pieces" if all(divided) else "copies"
    which = which if which != "copies" or not any(divided) else "some"
    return message(
        "gradient_scaled_along_axis",
        axis=axis,
        which=which,
        factor=round(factor, 4),
        parameters=len(names),
        all_parameters=count,
    )


def _is(factor: float, ranks: int) -> bool:
    return any(abs(factor / divisor - 1) <= TOLD_APART for divisor in (ranks, 1 / ranks))


def _cut_off(compared: Compared, ranks: Ranks) -> Finding | None:
    """Finds parts of the model that compute in a forward pass and get no gradient, though one process has one, where
    what ranks hand on to each other has no graph."""
    division = compared.division
    called = {name for rank in ranks for talk in rank.talks for name in talk.forward}
    operations = [name for name in called if returns_without_history(name)]
    cut = []
    for rank in ranks if operations else ():
        computes = {module.name for module in rank.modules if module.given.count and module.returned.count}
        names = [piece.name for piece in division.parts if piece.rank == division.layout.like(rank.rank)]
        recorded, wanted = compared.recorded[rank.rank], compared.wanted[rank.rank]
        # Before a layer that begins as zeros the gradient of one process is zero, too.
        with_gradient = [name for name in names if name in wanted and norm(wanted[name])]
        without = [name for name in with_gradient if name not in recorded or not norm(recorded[name])]
        cut += [(rank.rank, name) for name in without if name.rpartition(".")[0] in computes]
    if not cut:
        return None
    number, name = cut[0]
    figures = {"parameters": len({name for _, name in cut}), "operation": max(operations), "ranks": len(ranks)}
    cause = message("exchange_is_cut_off", axis=division.axis, **figures)
    quantity, expected = f"gradient along {division.axis}", message("gradient_of_one_process_of_a_part")
    found = message("a_norm", norm=0.0)
    return differs("gradient", quantity, cause, step=0, tensor=name, rank=number, expected=expected, found=found)


def _not_reduced(compared: Compared) -> Message | None:
    """Returns along which axis gradients are not added up, if that explains them all."""
    division, layout = compared.division, compared.division.layout
    for axis in (division.axis, "data", f"data x {division.axis}"):
        fits = []
        for rank, name in compared.apart:
            together = {
                division.axis: [r for r in layout.replica_of(rank) if name in compared.wanted[r]],
                "data": layout.same(rank),
            }.get(axis) or [r for r in compared.wanted if name in compared.wanted[r]]
            if axis != "data" and division.held.get(name) and division.is_divided(name):
                break
            divisors = {1.0, float(len(together)), float(len(layout.replicas))}
            fits.append(any(compared.is_combined(name, together, divisor) for divisor in divisors))
        if len(fits) == len(compared.apart) and all(fits):
            names, count = compared.names, len(compared.all_names)
            return message("not_reduced_along_axis", axis=axis, parameters=len(names), all_parameters=count)
    return None


def _own_factors(compared: Compared) -> list[float] | None:
    """Returns the factor of each rank, where all gradients of a rank have one of its own."""
    of_rank: dict[int, list[float]] = {}
    for rank, gradients in compared.wanted.items():
        factors = [compared.factor(rank, name) for name in gradients]
        known = [factor for factor in factors if factor is not None]
        if not known or len(known) < len(factors) or max(known) - min(known) > TOLD_APART * max(map(abs, known)):
            return None
        of_rank[rank] = known
    return [round(float(np.median(known)), 4) for known in of_rank.values()]


def _clipped_otherwise(compared: Compared) -> Message:
    """Returns why gradients that were right before clipping are not after it."""
    axis = compared.division.axis
    of_rank = []
    for rank in compared.wanted:
        factors = [compared.factor(rank, name) for name in compared.wanted[rank] if name in compared.recorded[rank]]
        of_rank.append(float(np.median([factor for factor in factors if factor is not None] or [1.0])))
    if max(of_rank) - min(of_rank) > TOLD_APART * max(of_rank):
        return message("clipped_by_local_norms", axis=axis, factors=[round(factor, 4) for factor in of_rank])
    return message("clipped_by_norm_of_copies", axis=axis, factor=round(of_rank[0], 4))
