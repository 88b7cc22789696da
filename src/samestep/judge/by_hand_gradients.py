"""Judges whether the gradients of ranks that share out a model are those of one process, and names the cause where
not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from samestep.bounds import LOSS_APART_OF_PIECES, TOLD_APART, ZERO_GRADIENT
from samestep.judge.by_hand import Division, draw_apart
from samestep.judge.findings import Ranks, differs, module_name
from samestep.judge.first_module import first_module_apart
from samestep.judge.fit import Array, count_in, norm
from samestep.judge.gradient_comparison import (
    GRADIENT,
    GradientComparison,
    bound_of_step,
    first_difference,
)
from samestep.judge.losses import losses_of, same_loss
from samestep.judge.step_gradients import before_clipping, coarser_of
from samestep.message import Message, message
from samestep.records.findings import Finding
from samestep.records.record import Record
from samestep.records.script import STEP, TAKEN, ScriptRecord, of_kind
from samestep.records.torch_collectives import returns_without_history

# Causes that a replay cannot tell from its own way to play the ranks.
UNKNOWN = ("whole_weights_give_another_loss", "replay_told_of_all_ranks")


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

    def steps() -> Iterator[_PartsStep | Finding]:
        for number in range(len(one_process.steps)):
            step = _PartsStep(
                division=division,
                ranks=ranks,
                one_process=one_process,
                record=record,
                replay=replay,
                number=number,
                told_ranks=told_ranks,
                gathers_cut=gathers_cut,
            )
            if number == 0 and (finding := _cut_off(step.before, division, ranks)):
                yield finding
            yield step

    finding, distance = first_difference(steps())
    if finding:
        return [finding]
    fed = message("fed_as_one")
    size_told = told_ranks if told_ranks == len(ranks) else None
    said = message("gradient_of_one_process", distance=distance, fed=fed, means=None, told=size_told)
    right = Finding(GRADIENT, "right", said)
    count = len(one_process.steps)
    is_clipped = any(rank.steps[number].clips for rank in ranks for number in range(count))
    said = message("clipped_once_a_step", steps=count) if is_clipped else message("nothing_is_clipped")
    return [right, Finding("clipping", "right", said)]


@dataclass(frozen=True)
class _PartsStep:
    """One step of ranks that each have a part of the model, and what one process has computed of it."""

    division: Division
    ranks: Ranks
    one_process: ScriptRecord

    record: Record
    """The folder with the gradients of the ranks."""

    replay: Record
    """The folder with the gradients of one process, put apart as the ranks hold them."""

    number: int
    """The number of the step."""

    told_ranks: int
    """The number of ranks that one process was told of."""

    gathers_cut: bool
    """Whether the ranks gather what has a gradient by collectives that hand none back."""

    @cached_property
    def before(self) -> GradientComparison:
        return self._compared(clipped=False)

    @cached_property
    def after(self) -> GradientComparison:
        return self._compared(clipped=True)

    def _compared(self, *, clipped: bool) -> GradientComparison:
        name, coarser = STEP.format(self.number), coarser_of(self.ranks)
        one_process = _gradients(self.replay.arrays(name), clipped=clipped)
        found, wanted = dict[int, dict[str, Array]](), dict[int, dict[str, Array]]()
        for rank in self.ranks:
            found[rank.rank] = _gradients(self.record.arrays(name, rank.rank), clipped=clipped)
            prefix = f"rank {self.division.layout.like(rank.rank)}: "
            keys = [key for key in one_process if key.startswith(prefix)]
            wanted[rank.rank] = {key.removeprefix(prefix): one_process[key] for key in keys}
        bound = bound_of_step(coarser, is_later=self.number > 0)
        # A bias of attention's keys has no effect: its gradient is rounding of zero.
        return GradientComparison.without_zeros(found, wanted, bound, rounding=ZERO_GRADIENT * coarser)

    def not_judged(self) -> Message | None:
        return None

    @property
    def rounding(self) -> float:
        return self.before.worst

    def gradient_finding(self, *, came_apart: bool) -> Finding:
        compared, cause = self.before, self._cause()
        if cause.id in UNKNOWN:
            return Finding(GRADIENT, "unknown", cause)
        holder = compared.apart[0]
        # Gradients go wrong on their way back: the last parameter is nearest to the fault.
        if cause.id in ("gradient_incomplete_along_axis", "ranks_compute_otherwise"):
            holder = next(holder for holder in compared.apart if holder[1] == compared.names[-1])
        quantity = f"gradient against one process, along {cause.fields.get('axis') or self.division.axis}"
        return compared.difference(GRADIENT, quantity, cause, step=self.number, holder=holder, rank=holder[0])

    def clipping_finding(self, after: GradientComparison) -> Finding:
        cause, holder = _clipped_otherwise(after, self.division.axis), after.apart[0]
        quantity = f"gradient against one process, along {self.division.axis}"
        return after.difference("clipping", quantity, cause, step=self.number, holder=holder, rank=holder[0])

    def _cause(self) -> Message:
        """Returns why the ranks' gradients are not those of one process: first what was tried and explains them all."""
        compared, division, ranks = self.before, self.division, self.ranks
        layout, axis, size = division.layout, division.axis, division.layout.size
        if factor := compared.common_factor(compared.apart):
            return _scaled(compared, division, factor, self.told_ranks)
        if found := _not_reduced(compared, division):
            return found
        near = LOSS_APART_OF_PIECES * coarser_of(ranks)
        is_same_loss = same_loss(ranks, self.one_process, 0, near) if self.number == 0 else None
        otherwise = message("ranks_compute_otherwise", axis=axis, ranks=size, replicas=len(layout.replicas))
        if is_same_loss is False:
            return self._cause_of_loss() or otherwise
        if factors := compared.factors_of_ranks():
            return message("clipped_by_local_norms", axis=axis, factors=[round(factor, 4) for factor in factors])
        if self.gathers_cut and is_same_loss:
            return message("gather_cuts_gradient")
        if any(_differs_within(compared, division, *holder) for holder in compared.apart):
            return message("gradient_incomplete_along_axis", axis=axis, parameter=compared.names[-1], ranks=size)
        return otherwise

    def _cause_of_loss(self) -> Message | None:
        """Returns why the first loss is not that of one process; None where that is not known."""
        division, layout, axis = self.division, self.division.layout, self.division.axis
        values = losses_of(self.ranks, 0)
        apart = any(values[replica[0]] != values[rank] for replica in layout.replicas for rank in replica)
        if layout.shares_rows and axis == "tensor" and apart and draw_apart(layout, self.ranks):
            return message("replica_draws_apart", axis=axis, step=0)
        if (module := first_module_apart(self.ranks, self.one_process)) is not None:
            return message("module_computes_otherwise", axis=axis, module=module_name(module), ranks=layout.size)
        if any(pieces[0].dimension >= 0 for pieces in division.held.values()):
            return message("whole_weights_give_another_loss", axis=axis)
        return None


def _gradients(arrays: Mapping[str, Array], *, clipped: bool) -> dict[str, Array]:
    return of_kind(arrays, TAKEN) if clipped else before_clipping(arrays)


def _differs_within(compared: GradientComparison, division: Division, rank: int, name: str) -> bool:
    """Returns whether ranks of a replica have another gradient of what each holds whole."""
    first = compared.found[rank].get(name)
    if first is None or division.is_divided(name):
        return False
    holders = [holder for holder in division.layout.replica_of(rank) if name in compared.wanted[holder]]
    arrays = [compared.found[holder].get(name) for holder in holders]
    return any(array is not None and norm(array - first) > TOLD_APART * norm(first) for array in arrays)


def _scaled(compared: GradientComparison, division: Division, factor: float, told_ranks: int) -> Message:
    """Returns why some gradients are one process's times a factor."""
    names, count = compared.names, len(compared.all_names)
    size, replicas = division.layout.size, len(division.layout.replicas)
    everything = len(compared.apart) == len(compared.holders)
    if everything and count_in(factor, {"told": told_ranks}):
        return message("replay_told_of_all_ranks", ranks=told_ranks)
    counted = count_in(factor, {division.axis: size, "data": replicas, f"data x {division.axis}": size * replicas})
    divided = [name in division.held and division.is_divided(name) for name in names]
    which = "all" if everything or len(names) == count else "pieces" if all(divided) else "copies"
    which = which if which != "copies" or not any(divided) else "some"
    return message(
        "gradient_scaled_along_axis",
        axis=counted[0] if counted else None,
        which=which,
        factor=round(factor, 4),
        parameters=len(names),
        all_parameters=count,
    )


def _cut_off(compared: GradientComparison, division: Division, ranks: Ranks) -> Finding | None:
    """Finds parts of the model that compute in a forward pass and get no gradient, though one process has one, where
    what ranks hand on to each other has no graph."""
    called = {name for rank in ranks for talk in rank.talks for name in talk.forward}
    operations = [name for name in called if returns_without_history(name)]
    cut = []
    for rank in ranks if operations else ():
        computes = {module.name for module in rank.modules if module.given.count and module.returned.count}
        names = [piece.name for piece in division.parts if piece.rank == division.layout.like(rank.rank)]
        recorded, wanted = compared.found[rank.rank], compared.wanted[rank.rank]
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


def _not_reduced(compared: GradientComparison, division: Division) -> Message | None:
    """Returns along which axis gradients are not added up, if that explains them all."""
    layout = division.layout
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
            fits.append(any(_is_combined(compared, name, together, divisor) for divisor in divisors))
        if len(fits) == len(compared.apart) and all(fits):
            names, count = compared.names, len(compared.all_names)
            return message("not_reduced_along_axis", axis=axis, parameters=len(names), all_parameters=count)
    return None


def _is_combined(compared: GradientComparison, name: str, ranks: list[int], divided_by: float) -> bool:
    """Returns whether the gradients that some ranks have of a parameter are together one process's."""
    parts = [compared.found[rank][name] for rank in ranks if name in compared.found[rank]]
    if len(parts) < len(ranks):
        return False
    wanted, first = compared.wanted[ranks[0]][name], parts[0]
    together: Array = np.sum(parts, axis=0) / divided_by
    # Where the parts are equal, their sum is one of them times a factor.
    unequal = any(norm(part - first) > TOLD_APART * norm(first) for part in parts)
    return unequal and norm(together - wanted) <= TOLD_APART * norm(wanted)


def _clipped_otherwise(after: GradientComparison, axis: str) -> Message:
    """Returns why gradients that were right before clipping are not after it."""
    factors = []
    for rank, of_rank in after.wanted.items():
        known = [factor for name in of_rank if (factor := after.factor(rank, name)) is not None]
        factors.append(float(np.median(known or [1.0])))
    if max(factors) - min(factors) > TOLD_APART * max(factors):
        return message("clipped_by_local_norms", axis=axis, factors=[round(factor, 4) for factor in factors])
    return message("clipped_by_norm_of_copies", axis=axis, factor=round(factors[0], 4))
