"""Names the cause of a difference from the numbers of an engine and the reference, without a replay.

The numbers tell the cause where rows, weights or names are wrong; hypotheses.py tries causes for the other differences.
CAUSES has a function for each quantity that is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from samestep.bounds import (
    BUFFER_APART,
    FACTOR_OF_RANKS,
    GRADIENT_APART,
    GRADIENT_APART_ULPS,
    MOVES_ALTHOUGH_STILL,
    NO_FACTOR,
    ROUNDED_ON_ITS_WAY,
    SHOWN_BY_SAMPLES,
    STANDS_STILL,
    TOLD_APART,
)
from samestep.message import Message, message
from samestep.proof.plan import AS_OWN
from samestep.proof.trace import EPS, Expectation, Trace, replicas_of, sample_like
from samestep.records.results import Divergence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Gradients = Mapping[str, NDArray[Any]]

CLIPPED_TO = 1.0  # the default of libraries that clip unasked


@dataclass(frozen=True)
class Case:
    """One training, as the reference and as an engine took it. name: that of the training in the engine's record."""

    expectation: Expectation
    training: str
    expected: Trace
    observed: Trace
    name: str = ""

    def divergence(
        self,
        quantity: str,
        expected: Any,
        observed: Any,
        *,
        step: int | None = None,
        tensor: str | None = None,
        rank: int | None = None,
        times_bound: float | None = None,
    ) -> Divergence:
        """Returns the divergence of one quantity, with its cause. times_bound: as of Divergence."""
        divergence = Divergence(
            self.training,
            step,
            quantity,
            tensor=tensor,
            rank=rank,
            expected=expected,
            found=observed,
            name=self.name,
            times_bound=times_bound,
        )
        cause = CAUSES[quantity](self, divergence)
        schedule = self.expectation.of(self.training).schedule
        if self.training == "late":
            shown_step = self.expected.last_step if step is None else step
            divergence = replace(divergence, epoch=self.expected.epochs[shown_step], schedule_step=schedule[shown_step])
            cause = message("wrong_in_later_epoch", epoch=divergence.epoch, cause=cause)
        elif self.name == AS_OWN.format(self.training):
            cause = message("wrong_in_own_dtype_alone", dtype=self.expectation.facts.dtype, cause=cause)
        return replace(divergence, expected=_short(expected), found=_short(observed), cause=cause)

    @property
    def replicas(self) -> int:
        facts = self.expectation.facts
        return (facts.then or facts.layout).replicas

    @property
    def is_right_under_sgd(self) -> bool:
        """Whether this is the job's own optimizer, and SGD's steps have been compared before, and are right."""
        return self.training == "user" and "sgd" in self.expectation.facts.trainings

    def begins_epoch(self, step: int) -> bool:
        """Returns whether a step is the first of an epoch other than the first."""
        epochs = self.expected.epochs
        return epochs[step] > 0 and step == min(s for s, epoch in epochs.items() if epoch == epochs[step])


def _short(value: Any) -> Any:
    """Returns a value to print: no list of one element, and no more than a few elements of a long one."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    if isinstance(value, list) and len(value) > 8:
        return [*value[:6], f"… {len(value)} in all"]
    return value


def _initial_weights(case: Case, divergence: Divergence) -> Message:
    if all(start == case.observed.start[0] for start in case.observed.start):
        return message("weights_moved_before_first_batch")
    return message("ranks_start_from_different_weights", rank=divergence.rank)


def _rows(case: Case, divergence: Divergence) -> Message:
    if divergence.step is None:
        return _later_rows(case, divergence)
    step = divergence.step
    rank_rows = case.observed.rows_of_processes(step)
    rows, expected = [row for part in rank_rows for row in part], case.expected.rows(step)
    longest = max(rank_rows, key=len)
    if sum(map(bool, rank_rows)) > 1 and all(part == longest[: len(part)] for part in rank_rows):
        return message("every_rank_reads_same_rows")
    if len(rows) > len(expected) and set(rows) == set(expected):
        return message("batch_padded_with_repeated_rows")
    if len(rows) != len(expected):
        return message("batch_has_another_size", found=len(rows), expected=len(expected))
    if case.begins_epoch(step) and rows in _first_rows_of_epochs(case, step):
        return message("order_does_not_change_with_epoch")
    if sorted(rows) == sorted(expected):
        return message("rows_shared_out_in_another_way")
    return message("rows_of_another_order")


def _first_rows_of_epochs(case: Case, before: int) -> list[list[int]]:
    """Returns the rows of the first step of each epoch that begins before step `before`."""
    first: dict[int, int] = {}
    for step, epoch in sorted(case.expected.epochs.items()):
        first.setdefault(epoch, step)
    return [case.expected.rows(step) for step in first.values() if step < before]


def _later_rows(case: Case, divergence: Divergence) -> Message:
    """Names the cause of wrong rows that a rank would read in an epoch that no training reaches."""
    plans = case.expectation.of(case.training).later.values()
    processes, rank = len(case.observed.micro_batches), divergence.rank or 0
    replicas = replicas_of(rank, processes, case.replicas, case.observed.mesh)
    known = [[row for micro in plan for rows in micro[replicas] for row in rows] for plan in plans]
    first = [row for batch in case.expected.micro_batches[rank] if batch.step == 0 for row in batch.indices]
    is_of_another = divergence.found in [first, *known]
    return message("later_epoch_has_order_of_another" if is_of_another else "later_epoch_has_other_rows")


def _tensors(case: Case, divergence: Divergence) -> Message:
    """Looks for the row, or the epoch, whose tensors were read instead."""
    step, rank = divergence.step or 0, divergence.rank or 0
    rows_with: dict[str, set[tuple[int, int]]] = {}
    for part in case.expected.all_micro_batches:
        for row, digest in zip(part.indices, part.digests):
            rows_with.setdefault(digest, set()).add((part.epoch, row))
    pairs = zip(case.expected.micro_batches[rank], case.observed.micro_batches[rank])
    parts = [(expected, found) for expected, found in pairs if expected.step == step]
    of_rows = [
        (part.epoch, row, found)
        for part, observed in parts
        for row, digest, found in zip(part.indices, part.digests, observed.digests)
        if digest != found
    ]
    for meant_epoch, row, found in of_rows:
        if len(places := rows_with.get(found, set())) != 1:
            continue
        ((epoch, found_row),) = places
        if found_row != row:
            return message("row_read_in_place_of_another", rank=rank, found=found_row, meant=row)
        if epoch != meant_epoch:
            if case.begins_epoch(step):
                return message("augmentation_ignores_epoch")
            return message("row_of_another_epoch", rank=rank, meant=row, found=epoch, epoch=meant_epoch)
    rows = sum(len(part.indices) for part, _ in parts)
    return message("values_of_right_rows_differ", count=len(of_rows), rows=rows, rank=rank, step=step)


def _weight(case: Case, divergence: Divergence) -> Message:
    return message("weights_of_right_rows_differ")


def _loss(case: Case, divergence: Divergence) -> Message:
    step = divergence.step or 0
    if step == 0:
        return message("first_loss_differs")
    if case.is_right_under_sgd:
        return message("own_optimizer_differs")
    return message("update_wrong_at_one_step", step=step - 1, next=step)


def _learning_rate(case: Case, divergence: Divergence) -> Message:
    step, found = divergence.step or 0, divergence.found
    factor = found[0] / divergence.expected[0] if divergence.expected[0] else float("inf")
    if step == 0:
        if case.replicas > 1 and np.isclose(factor, case.replicas):
            return message("learning_rate_multiplied_by_ranks", ranks=case.replicas)
        return message("learning_rate_of_another_size", factor=float(factor))
    rates = case.expectation.of(case.training).rates
    if case.replicas > 1 and case.replicas * step < len(rates) and np.allclose(found, rates[case.replicas * step]):
        return message("scheduler_steps_once_for_each_rank", ranks=case.replicas)
    return message("scheduler_steps_at_other_times")


def _optimizer_steps(case: Case, divergence: Divergence) -> Message:
    # The rate of one step is missing: its number is the one that the other side has in its place.
    fewer = divergence.found < divergence.expected
    return message("optimizer_steps_left_out" if fewer else "optimizer_steps_repeated")


def _parameter_groups(case: Case, divergence: Divergence) -> Message:
    return message("parameter_groups_missing", found=divergence.found, expected=divergence.expected)


def _parameter(case: Case, divergence: Divergence) -> Message:
    return message("own_optimizer_differs" if case.is_right_under_sgd else "last_update_wrong")


def _buffer(case: Case, divergence: Divergence) -> Message:
    tensor = divergence.tensor or ""
    if tensor.endswith("num_batches_tracked") and divergence.expected:
        factor = divergence.found / divergence.expected
        if factor > 1 and factor == int(factor):
            return message("batches_counted_repeatedly", factor=int(factor))
    for replica in range(1, case.replicas):
        buffer = case.expectation.arrays(case.training, f".buffers{replica}").get(tensor)
        if buffer is not None and np.allclose(buffer, case.observed.state[tensor], rtol=BUFFER_APART, atol=0):
            return message("buffers_of_another_rank", rank=replica)
    return message("buffers_synchronised_in_another_way")


def _names(case: Case, divergence: Divergence) -> Message:
    return message("names_of_weights_differ")


def _every_index(case: Case, divergence: Divergence) -> Message:
    return message("samples_repeated_or_lost_in_epoch")


def _evaluation_rows(case: Case, divergence: Divergence) -> Message:
    if divergence.tensor == "weight":
        return message("evaluation_weights_differ")
    more = divergence.found > divergence.expected
    return message("evaluation_padded" if more else "evaluation_of_a_part_of_the_rows")


def _evaluation(case: Case, divergence: Divergence) -> Message:
    return message("evaluation_value_differs")


def _precision(case: Case, divergence: Divergence) -> Message:
    return message("autocast_not_declared")


def _replicas(case: Case, divergence: Divergence) -> Message:
    return message("rank_ends_with_other_weights", rank=divergence.rank)


def _gradient(case: Case, divergence: Divergence) -> Message:
    """Names the cause of a wrong first gradient, from samples of all its tensors."""
    rank0, tensor = case.expectation.arrays("gradient", ".own"), divergence.tensor or ""
    if tensor not in rank0:
        return message("rank_0_has_no_gradient_of_it", tensor=tensor)
    start = case.expectation.start()
    expected, observed = (
        {name: start[name] - sample_like(state[name], sample) for name, sample in rank0.items()}
        for state in (case.expected.state, case.observed.state)
    )
    size = max(np.abs(values).max() for values in expected.values())
    # The other elements are rounding around zero.
    trained = [name for name in rank0 if np.abs(expected[name]).max() > STANDS_STILL * size]
    slack = {name: _slack(case.expectation, start[name], expected[name]) for name in rank0}
    still = [name for name in rank0 if name not in trained]
    moved = [name for name in still if np.abs(observed[name]).max() > max(MOVES_ALTHOUGH_STILL * size, slack[name])]
    if moved or not trained:
        return message("frozen_parameter_moves", tensors=moved or [tensor])
    state_difference = np.abs(case.expected.state[tensor] - case.observed.state[tensor]).max()
    if np.abs(expected[tensor] - observed[tensor]).max() < SHOWN_BY_SAMPLES * state_difference:
        return message("gradient_differs_between_samples")

    def alike(name: str, values: Any) -> bool:
        return bool(np.abs(observed[name] - values).max() <= slack[name])

    shares = {
        name: float(np.abs(expected[name] - observed[name]).max() / np.abs(expected[name]).max()) for name in trained
    }
    worst = max(shares, key=lambda name: shares[name])
    factor = _factor(expected, observed, trained)
    is_multiple = all(alike(name, factor * expected[name]) for name in trained)
    if is_multiple and not math.isclose(factor, 1.0, rel_tol=TOLD_APART):
        norm = math.sqrt(sum(float((observed[name] ** 2).sum()) for name in trained))
        return _scaled(case.expectation, factor, norm)
    wrong = [name for name in trained if not alike(name, expected[name])]
    if wrong and all(alike(name, rank0[name]) for name in wrong):
        if len(wrong) == len(trained):
            return message("gradients_never_reduced")
        return message("gradients_left_out_of_reduction", tensors=wrong)
    for along in _parts(case.observed, trained):
        if wrong and {*wrong} <= {*along.names}:
            factor = _factor(expected, observed, wrong)
            fields = {"tensors": wrong, "which": along.said(is_all=len(wrong) == len(along.names))}
            if all(alike(name, factor * expected[name]) for name in wrong):
                return message("gradients_of_a_part_scaled", factor=factor, **fields)
            if len(wrong) < len(trained):
                return message("gradients_of_a_part_wrong", **fields)
    before_last = case.expectation.arrays("gradient", ".before_last")
    if before_last:
        rank0_before = case.expectation.arrays("gradient", ".own_before_last")
        if all(alike(name, expected[name] - before_last[name]) for name in trained):
            return message("gradient_of_last_micro_batch_alone")
        if all(alike(name, before_last[name] + rank0[name] - rank0_before[name]) for name in trained):
            return message("last_micro_batch_not_reduced")
    if shares[worst] < ROUNDED_ON_ITS_WAY:
        return message("gradients_rounded_on_their_way", share=shares[worst])
    if not wrong:
        return message("gradients_off_by_a_share", tensor=worst, share=shares[worst])
    if len(wrong) < len(trained):
        return message("gradients_of_some_tensors_wrong", tensors=wrong, worst=worst)
    return message("part_of_gradient_missing_or_repeated")


@dataclass(frozen=True)
class _Part:
    """The parameters that the ranks of an axis divide, or hold whole, or that the rank at one place of the axis holds
    alone. size: of the axis. place: None: all places."""

    names: Sequence[str]
    axis: str
    size: int
    place: int | None = None
    is_whole: bool = False

    def said(self, *, is_all: bool) -> Message:
        """Returns a message that names these parameters. is_all: whether it means all of them."""
        how_many = message("all_of" if is_all else "some_of")
        fields = {"axis": self.axis, "ranks": self.size, "how_many": how_many}
        if self.place is not None:
            return message("parameters_at_a_place_of_the_axis", place=self.place, **fields)
        return message("parameters_whole_along_the_axis" if self.is_whole else "parameters_divided_along", **fields)


def _parts(observed: Trace, names: Sequence[str]) -> Iterator[_Part]:
    """Yields the parts into which the axes of a mesh divide these parameters, the smallest parts of each axis first."""
    for axis, size in (observed.mesh.sizes if observed.mesh else {}).items():
        places = {name: observed.divided[name][axis] for name in names if axis in observed.divided.get(name, {})}
        for place in range(size):
            if alone := [name for name in places if places[name] == {place}]:
                yield _Part(alone, axis, size, place)
        if places:
            yield _Part([*places], axis, size)
            yield _Part([name for name in names if name not in places], axis, size, is_whole=True)


def _slack(expectation: Expectation, start: Any, expected: Any) -> float:
    """Returns how far rounding may move one tensor: of the gradient on its way, and of the weights that it is read
    from."""
    gradient_eps, largest = expectation.eps, float(np.abs(expected).max())
    weights_eps = min(gradient_eps, EPS["float32"])  # the weights stay float32 or wider
    return max(
        GRADIENT_APART * largest,
        GRADIENT_APART_ULPS * (gradient_eps * largest + weights_eps * float(np.abs(start).max())),
    )


def _factor(expected: Gradients, observed: Gradients, names: list[str]) -> float:
    """Returns the number by which the gradient is multiplied, if it is one number."""
    products = sum(float((expected[name] * observed[name]).sum()) for name in names)
    return products / sum(float((expected[name] ** 2).sum()) for name in names)


def _scaled(expectation: Expectation, factor: float, norm: float) -> Message:
    """Returns the cause of a gradient that is `factor` times the right one. norm: what its norm has become."""
    replicas = expectation.facts.layout.replicas
    close = max(FACTOR_OF_RANKS, GRADIENT_APART_ULPS * expectation.eps)
    if math.isclose(factor, replicas, rel_tol=close):
        return message("gradients_summed_instead_of_averaged", ranks=replicas)
    if math.isclose(factor, 1 / replicas, rel_tol=close):
        return message("gradients_averaged_twice", ranks=replicas)
    if abs(factor) < NO_FACTOR:
        return message("optimizer_holds_other_parameters")
    for limit in (CLIPPED_TO, expectation.facts.clip_norm):
        if limit is not None and factor < 1 and math.isclose(norm, limit, rel_tol=TOLD_APART):
            return message("gradients_clipped_unasked", factor=factor, norm=norm)
    return message("loss_scaled_by_another_factor", factor=factor)


CAUSES = {
    "precision": _precision,
    "initial weights": _initial_weights,
    "rows": _rows,
    "indices": _rows,
    "tensors received": _tensors,
    "weight": _weight,
    "loss": _loss,
    "learning rate": _learning_rate,
    "optimizer steps": _optimizer_steps,
    "parameter groups": _parameter_groups,
    "first gradient": _gradient,
    "parameter": _parameter,
    "buffer": _buffer,
    "names of the weights": _names,
    "replicas": _replicas,
    "every index once": _every_index,
    "evaluation rows": _evaluation_rows,
    "evaluation": _evaluation,
}
