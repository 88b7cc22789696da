"""Compares an engine's record with the reference, quantity by quantity, within measured bounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from samestep.bounds import FLOOR_ULPS, SHOWN_BY_SAMPLES, SUM_ULPS, TIMES_NOISE, USELESS
from samestep.message import Message, message
from samestep.proof.causes import Case
from samestep.proof.trace import (
    EPS,
    Expectation,
    Trace,
    TracedMicroBatch,
    disagreement,
    of_engine,
    replicas_of,
    sample_like,
)
from samestep.records.record import Record
from samestep.records.results import Divergence
from samestep.records.training_record import EvaluationRecord

if TYPE_CHECKING:
    from samestep.proof.trace import State

NOT_PLAYED = {"late": "late_epochs_not_compared", "life": "life_not_compared"}
PART = " from ["  # in the name of a part of a parameter; see rank/digests.py
BLOCK = 1 << 16  # elements that are compared at once


class Outside(NamedTuple):
    """A tensor that differs by more than rounding explains. times_bound: as of Divergence."""

    name: str
    expected: Any
    observed: Any
    times_bound: float | None


class Comparison:
    """An engine's record beside the reference, and what the comparison says of both so far.

    names: of the record's trainings, '{}' being the proof's. inexact: whether the engine is inexact by design.
    """

    def __init__(self, expectation: Expectation, record: Record, names: str = "{}", *, inexact: bool = False) -> None:
        self.expectation, self.record, self.names = expectation, record, names
        self.processes, self.inexact = len(record.ranks), inexact
        self.mesh = record.ranks[0].world.mesh
        self.eps = expectation.eps
        self.bitwise = True
        self.compared = 0  # tensors, under SGD
        self.shown = 0  # tensors that move further than their bound: a fault as large as their movement would show
        self.worst: tuple[float, float] | None = None  # (difference, bound) of the weight that is furthest off
        # Training -> the tensors that rounding alone moves too far to compare.
        self.ill_conditioned: dict[str, list[str]] = {}
        self.unresolved: list[str] = []  # tensors that are compared, but move too little to show a fault
        self.not_compared: list[Message] = []  # the quantities of a run's life that cannot be compared
        self.reach: dict[str, int] = {}  # training -> the first step whose losses rounding alone moves visibly

    def divergences(self, training: str) -> Iterator[Divergence]:
        """Yields the differences in one training, in causal order. The user is shown the first."""
        expected = self.expectation.trace(training, 0, self.processes, self.mesh)
        variants = range(1, len(self.expectation.facts.trainings[training]))
        noisy = [self.expectation.trace(training, variant, self.processes, self.mesh) for variant in variants]
        observed = of_engine(self.record, self.names.format(training))
        case = Case(self.expectation, training, expected, observed, name=self.names.format(training))
        yield from self._start(case)
        if not self.inexact or self.expectation.facts.rounds == "sums":
            yield from self._precision(case)
        bounds = self.loss_bounds(case.expected, noisy)
        self._note_reach(case, bounds)
        yield from self._steps(case, bounds)
        if training == "gradient":
            yield from self._gradient(case)
        else:
            if training != "late":
                yield from self._coverage(case)
                yield from self._later(case)
            yield from self._final(case)
            yield from self._evaluation(case, noisy)
        yield from self._replicas(case)

    def _start(self, case: Case) -> Iterator[Divergence]:
        for rank, (want, got) in enumerate(zip(case.expected.start, case.observed.start)):
            if len(want) != len(got):
                yield case.divergence("initial weights", len(want), len(got), rank=rank)
            names = dict(enumerate(case.expected.state)) if len(case.expected.state) == len(want) else {}
            for number, pair in enumerate(zip(want, got)):
                if pair[0] != pair[1]:
                    yield case.divergence("initial weights", *pair, tensor=names.get(number), rank=rank)

    def _precision(self, case: Case) -> Iterator[Divergence]:
        """Checks that autocast is off on an exact engine: in the proof's float64 it would change nothing."""
        for rank, training in enumerate(self.record.training(self.names.format(case.training))):
            if training.autocast:
                yield case.divergence("precision", "float32 as given", "autocast", rank=rank)

    def _note_reach(self, case: Case, bounds: list[float]) -> None:
        """Notes the first step whose losses rounding alone moves visibly."""
        sizes = [0.0] * len(bounds)
        for micro_batch in case.expected.all_micro_batches:
            sizes[micro_batch.step] = max(sizes[micro_batch.step], abs(micro_batch.loss_sum))
        visible = (step for step, bound in enumerate(bounds) if bound > USELESS * max(sizes[step], sizes[0]))
        if (first := next(visible, None)) is not None:
            self.reach[case.training] = first

    def _steps(self, case: Case, bounds: list[float]) -> Iterator[Divergence]:
        """Yields the divergences of the steps, one after the other: of each rank's rows, tensors and loss, then of what
        its optimizer did."""
        for step in range(1 + case.expected.last_step):
            for rank in range(self.processes):
                yield from self._micro_batches(case, step, rank, bounds[step])
            for rank in range(self.processes):
                want, got = (trace.rates[rank][step : step + 1] for trace in (case.expected, case.observed))
                if not got:
                    taken = len(case.observed.rates[rank])
                    yield case.divergence("optimizer steps", step + 1, taken, step=step, rank=rank)
                elif len(want[0]) != len(got[0]):
                    yield case.divergence("parameter groups", len(want[0]), len(got[0]), step=step, rank=rank)
                elif want != got:
                    yield case.divergence("learning rate", want[0], got[0], step=step, rank=rank)
        for rank in range(self.processes):
            want_count, got_count = len(case.expected.rates[rank]), len(case.observed.rates[rank])
            if want_count != got_count:
                yield case.divergence("optimizer steps", want_count, got_count, rank=rank)

    def _micro_batches(self, case: Case, step: int, rank: int, loss_bound: float) -> Iterator[Divergence]:
        """Yields the divergences of one rank's micro-batches of one step: of their rows, tensors, weights and
        losses."""
        expected = [micro_batch for micro_batch in case.expected.micro_batches[rank] if micro_batch.step == step]
        observed = [micro_batch for micro_batch in case.observed.micro_batches[rank] if micro_batch.step == step]

        def differs(quantity: str, value: Callable[[TracedMicroBatch], Any]) -> Iterator[Divergence]:
            if list(map(value, expected)) != list(map(value, observed)):
                yield case.divergence(
                    quantity, list(map(value, expected)), list(map(value, observed)), step=step, rank=rank
                )

        yield from differs("rows", lambda micro_batch: len(micro_batch.indices))
        yield from differs("indices", lambda micro_batch: micro_batch.indices)
        yield from differs("tensors received", lambda micro_batch: micro_batch.digests)
        yield from differs("weight", lambda micro_batch: micro_batch.weight)
        for want, got in zip(expected, observed):
            self.bitwise &= want.loss_sum == got.loss_sum
            difference = abs(want.loss_sum - got.loss_sum)
            if not difference <= loss_bound:  # 'not <=': NaN differs too
                times = times_bound(difference, loss_bound)
                yield case.divergence("loss", want.mean_loss, got.mean_loss, step=step, rank=rank, times_bound=times)

    def loss_bounds(self, expected: Trace, noisy: list[Trace]) -> list[float]:
        """Returns how far rounding explains that each step's loss is off. This never shrinks: an early difference stays
        in the weights."""
        facts = self.expectation.facts
        eps = EPS[facts.dtype] if facts.rounds == "sums" else self.eps
        floors: dict[int, float] = {}
        moved: dict[int, list[float]] = {}  # step -> how far each draw of noise moves its losses
        for rank, micro_batches in enumerate(expected.micro_batches):
            for number, micro_batch in enumerate(micro_batches):
                step, sum_ = micro_batch.step, micro_batch.loss_sum
                distances = [abs(sum_ - trace.micro_batches[rank][number].loss_sum) for trace in noisy]
                moved[step] = [*map(max, distances, moved.get(step, distances))]
                floors[step] = max(floors.get(step, 0.0), FLOOR_ULPS * eps * abs(sum_))
        bounds, widest = [], 0.0
        for step, draws in sorted(moved.items()):
            rounding = TIMES_NOISE * disagreement(draws, floors[step]) * max(draws)
            widest = max(widest, rounding, floors[step])
            bounds.append(widest)
        return bounds

    def _gradient(self, case: Case) -> Iterator[Divergence]:
        """Yields the divergences of the first gradient: one step of SGD at rate 1 moves each weight by minus its
        gradient."""
        start = self.expectation.start()
        names = self.expectation.of("gradient").parameters
        for name, want, got, times in self._outside(case, names):
            sampled = [sample_like(values, start[name]) for values in (want, got)]
            index, spread = furthest(*sampled), distance(want, got)
            pair: list[Any] = [float(start[name][index] - values[index]) for values in sampled]
            if 0 < SHOWN_BY_SAMPLES * spread > distance(*sampled):
                pair = ["the reference's", f"{spread:.3g} off, in few of its elements"]
            yield case.divergence("first gradient", *pair, step=0, tensor=name, times_bound=times)

    def _final(self, case: Case) -> Iterator[Divergence]:
        """Parameters and buffers after the last step."""
        parameters = set(self.expectation.of(case.training).parameters)
        want_names, got_names = sorted(case.expected.state), sorted(case.observed.state)
        if want_names != got_names:
            yield case.divergence("names of the weights", want_names, got_names)
            return
        buffers = [name for name in want_names if name not in parameters]
        for quantity, names in (("parameter", sorted(parameters)), ("buffer", buffers)):
            for name, want, got, times in self._outside(case, names):
                pair, last = [_shown(values[furthest(want, got)]) for values in (want, got)], case.expected.last_step
                yield case.divergence(quantity, *pair, step=last, tensor=name, times_bound=times)

    def _replicas(self, case: Case) -> Iterator[Divergence]:
        """Yields the divergences of the ranks' parameters after the last step, to the last bit: only rank 0's have been
        compared. Parts, which not every rank holds, are compared with those of the first rank that holds them."""
        trainings = self.record.training(self.names.format(case.training))
        first: dict[str, int] = dict(trainings[0].end_digests)
        for rank, digests in enumerate((training.end_digests for training in trainings[1:]), 1):
            found = {**{name: 0 for name in first if PART not in name}, **digests}
            for name in [name for name in found if found[name] != first.setdefault(name, found[name])]:
                pair = [f"{digest:016x}" for digest in (first[name], found[name])]
                yield case.divergence("replicas", *pair, step=case.expected.last_step, tensor=name, rank=rank)

    def _outside(self, case: Case, names: list[str]) -> list[Outside]:
        spread = self.expectation.noise_distances(case.training)
        return self.outside(case.training, {n: case.expected.state[n] for n in names}, case.observed.state, spread)

    def outside(
        self, training: str, expected: Mapping[str, Any], observed: Mapping[str, Any], spread: Mapping[str, float]
    ) -> list[Outside]:
        """Returns the tensors that differ by more than rounding explains.

        spread: how far rounding alone moves each of `expected`.
        """
        outside = []
        moved = self.expectation.of(training).moved
        bounds, largest = self._bounds(training, expected, spread)
        for name, want in expected.items():
            got = observed.get(name)
            if got is None or got.shape != want.shape:
                outside.append(Outside(name, want, np.full_like(want, np.nan, dtype=np.float64), None))
                continue
            bound = bounds[name]
            difference = distance(want, got)
            self.bitwise &= difference == 0
            movement = moved[name].distance
            if bound > USELESS * movement > 0 and self.eps > EPS["float64"] and np.issubdtype(want.dtype, np.floating):
                self.unresolved.append(name)  # compared, but a fault as small as its own movement would not be seen
            if says_nothing(bound, movement, largest, self.eps):
                self.ill_conditioned.setdefault(training, []).append(name)
                continue
            self.compared += training == "sgd"
            self.shown += training == "sgd" and movement > bound
            if self.worst is None or not difference <= self.worst[0]:
                self.worst = (difference, bound)
            if not difference <= bound:
                outside.append(Outside(name, want, got, times_bound(difference, bound)))
        return outside

    def _bounds(self, training: str, state: State, spread: Mapping[str, float]) -> tuple[dict[str, float], float]:
        """Returns how far rounding explains that each tensor is off, and the largest value of all tensors, at most 1.
        state: the reference's."""
        moved = self.expectation.of(training).moved
        largest = largest_value(map(largest_of, state.values()))
        furthest = max((moved[name].distance for name in state), default=0.0)
        bounds = {}
        for name, want in state.items():
            bounds[name] = 0.0
            if np.issubdtype(want.dtype, np.floating):
                sizes = largest_of(want), moved[name].largest_before, furthest
                bounds[name] = bound_of(spread[name], self.eps, *sizes)
        return bounds, largest

    def tensor_bounds(self, training: str, state: State, *, buffers: bool) -> dict[str, float]:
        """Returns what rounding explains of each parameter and, where asked for, of each buffer, without those that
        rounding moves too far. state: the reference's after the last step."""
        parameters = self.expectation.of(training).parameters
        compared = {name: tensor for name, tensor in state.items() if buffers or name in parameters}
        bounds, largest = self._bounds(training, compared, self.expectation.noise_distances(training))
        moved = self.expectation.of(training).moved
        return {n: b for n, b in bounds.items() if not says_nothing(b, moved[n].distance, largest, self.eps)}

    def _coverage(self, case: Case) -> Iterator[Divergence]:
        """Yields the epochs that ended and have not read every index once, in each phase; needs no reference."""
        played = self.expectation.of(case.training)
        if not played.each_once:
            return
        observed = case.observed.all_micro_batches
        for epoch, phase in product(range(max(micro_batch.epoch for micro_batch in observed)), range(played.phases)):
            read = (batch for batch in observed if batch.epoch == epoch and batch.step % played.phases == phase)
            counts = Counter(row for micro_batch in read for row in micro_batch.indices)
            dropped = self._dropped(case, epoch)
            if sum(counts.values()) != played.length - dropped or any(count > 1 for count in counts.values()):
                yield case.divergence("every index once", played.length - dropped, sum(counts.values()))

    def _later(self, case: Case) -> Iterator[Divergence]:
        """Yields the divergences of the rows of epochs that no training of the proof reaches, as each side would share
        them out."""
        ranks = self.record.training(self.names.format(case.training))
        for epoch, plan in self.expectation.of(case.training).later.items():
            for rank, training in enumerate(ranks):
                held = replicas_of(rank, self.processes, len(plan[0]), self.mesh)
                expected = [row for micro_batch in plan for rows in micro_batch[held] for row in rows]
                if expected != training.later[epoch]:
                    yield case.divergence("indices", expected, training.later[epoch], rank=rank)

    def _dropped(self, case: Case, epoch: int) -> int:
        """Returns the number of rows that last=drop leaves out, which the reference left out too."""
        played = self.expectation.of(case.training)
        trained = [batch for batch in case.expected.all_micro_batches if batch.epoch == epoch]
        rows = sum(len(micro_batch.indices) for micro_batch in trained)
        return played.length - rows // played.phases

    def _evaluation(self, case: Case, noisy: list[Trace]) -> Iterator[Divergence]:
        """Yields the divergences of the final weights' evaluation: of its rows and their weights, its sums and
        means."""
        if not case.expected.evaluation:
            return
        want = case.expected.evaluation[0]
        counts = Counter(index for got in case.observed.evaluation for index in got.indices)
        factor = self.expectation.disagreement(case.training)
        for rank, got in enumerate(case.observed.evaluation):
            if got.rows != want.rows:
                yield case.divergence("evaluation rows", want.rows, got.rows, rank=rank)
            steady = not any(name.startswith("weight") for name in want.unsteady)
            if steady and not math.isclose(got.weight, want.weight, rel_tol=SUM_ULPS * EPS["float64"]):
                yield case.divergence("evaluation rows", want.weight, got.weight, tensor="weight", rank=rank)
            for name, total in want.sums.items():
                over = want.divisor(name)
                if name in want.unsteady:
                    continue
                bound = evaluation_bound(name, total, [trace.evaluation[0] for trace in noisy], self.eps, factor)
                pair = (total / over, got.means.get(name, math.nan))
                off = max_of((abs(got.sums.get(name, math.nan) - total), abs(pair[0] - pair[1]) * over))
                if not off <= bound:
                    times = times_bound(off, bound)
                    yield case.divergence("evaluation", *pair, tensor=name, rank=rank, times_bound=times)
        if counts != Counter(range(want.rows)):
            yield case.divergence("evaluation rows", want.rows, sum(counts.values()))

    def notes(self) -> list[Message]:
        """Returns the notes that the reader of the verdict must know."""
        facts, sgd = self.expectation.facts, self.expectation.of("sgd")
        notes = []
        if facts.dtype != "float64":
            notes.append(message("proven_in_another_dtype", dtype=facts.dtype, why=facts.float64_failed))
        if self.ill_conditioned:
            notes.append(self.ill_conditioned_tensors())
        ill_conditioned = {name for names in self.ill_conditioned.values() for name in names}
        unresolved = [name for name in dict.fromkeys(self.unresolved) if name not in ill_conditioned]
        if unresolved and not self.inexact:
            notes.append(message("tensors_move_too_little", dtype=self.expectation.rounded_to, tensors=unresolved))
        for training, step in self.reach.items():
            is_own = training == "user"
            notes.append(
                message("proof_ends_early_under_own_optimizer" if is_own else "proof_ends_early_under_sgd", step=step)
            )
        if sgd.evaluation and sgd.evaluation.unsteady:
            notes.append(message("evaluation_metrics_unsteady", metrics=sgd.evaluation.unsteady))
        if "user" in facts.trainings:
            user = self.expectation.of("user")
            if not any(user.moved[name].distance for name in user.parameters if name in user.moved):
                rate = max((rate for rates in user.rates for rate in rates), default=0.0)
                notes.append(message("own_optimizer_moves_nothing", rate=rate))
        if not facts.scales:
            notes.append(message("gradients_do_not_follow_loss"))
        if facts.sgd_lr < facts.sgd_lr_usual:
            notes.append(message("rate_of_proof_lowered", rate=facts.sgd_lr, usual=facts.sgd_lr_usual))
        elif facts.sgd_lr > facts.sgd_lr_usual:
            notes.append(message("rate_of_proof_raised", rate=facts.sgd_lr, usual=facts.sgd_lr_usual))
        compared = [self.expectation.of(name) for name in ("sgd", "user") if name in facts.trainings]
        clip, largest = sgd.clip_norm, max(norm for training in compared for norm in training.norms)
        if clip is not None and largest <= clip:
            notes.append(message("clipping_never_acted", norm=largest, limit=clip))
        notes += [Message(NOT_PLAYED[name], {"why": why}) for name, why in facts.not_played.items()]
        notes += self.not_compared
        return notes

    def ill_conditioned_tensors(self) -> Message:
        """Returns the note of the tensors that cannot be compared. sgd, user: by the training's optimizer."""
        sgd = [name for training in ("gradient", "sgd") for name in self.ill_conditioned.get(training, ())]
        return message("tensors_ill_conditioned", sgd=[*dict.fromkeys(sgd)], user=self.ill_conditioned.get("user", []))


def times_bound(difference: float, bound: float) -> float | None:
    """Returns a difference as a multiple of its bound; None where it has none, or is not a number."""
    return difference / bound if bound and math.isfinite(difference) else None


def evaluation_bound(
    name: str, total: float, noisy: Sequence[EvaluationRecord], eps: float, factor: float = 1.0
) -> float:
    """Returns how far rounding explains that a sum of an evaluation is off. noisy: the same evaluation with noise.
    factor: by which its draws disagree.

    torchmetrics count in float32, whatever the outputs are: the noise of float64 moves none of its digits, or the last.
    """
    if any(name in evaluation.whole for evaluation in noisy) and float(np.float32(total)) == total:
        eps = max(eps, EPS["float32"])
    spread = max((abs(total - evaluation.sums[name]) for evaluation in noisy), default=0.0)
    return max(TIMES_NOISE * factor * spread, SUM_ULPS * eps * abs(total))


def bound_of(spread: float, eps: float, largest: float, largest_before: float, furthest: float) -> float:
    """Returns how far rounding explains that a tensor is off.

    spread: how far the noise moves it. largest, largest_before: its largest values at the end and at the start.
    furthest: how far any tensor moves: one whose true gradient is zero, such as the bias of attention's keys, moves by
    the rounding of the others' gradients.
    """
    return max(TIMES_NOISE * spread, FLOOR_ULPS * eps * max(largest, largest_before, furthest))


def says_nothing(bound: float, movement: float, largest: float, eps: float) -> bool:
    """Returns whether a bound is too wide to compare a tensor with: above a thousandth of the tensor's own movement,
    and above what the eye of this dtype sees of the largest value. largest: see largest_value."""
    return bound > USELESS * movement and bound > eps**0.5 * largest


def largest_value(sizes: Iterable[float]) -> float:
    """Returns the largest value of all tensors, by which bounds are judged; at most 1."""
    return min(1.0, max(sizes, default=0.0))


def _gap(a: Any, b: Any) -> Any:
    """Returns |a - b|, elementwise, for any dtype; 0 where both are the same infinity, as in a mask, or NaN, as in a
    table with missing values. NaN where one alone is NaN."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(_wide(a) - _wide(b))
        return np.where((a == b) | ((a != a) & (b != b)), 0.0, difference)


def distance(a: Any, b: Any) -> float:
    """Returns the greatest difference of two arrays."""
    return max_of(float(np.max(_gap(*pair), initial=0.0)) for pair in _blocks(a, b))


def largest_of(values: Any) -> float:
    """Returns the largest finite magnitude."""

    largest = 0.0
    for (block,) in _blocks(values):
        sizes = np.abs(block.astype(np.float64))
        largest = max(largest, float(np.max(sizes, initial=0.0, where=np.isfinite(sizes))))
    return largest


def max_of(distances: Iterable[float]) -> float:
    """Returns the greatest of some numbers; NaN where one is NaN, which max would lose."""
    return float(np.max(np.fromiter(distances, np.float64), initial=0.0))


def _blocks(*arrays: Any) -> Iterator[tuple[Any, ...]]:
    """Yields equal parts of flat arrays: temporary arrays of the largest tensors' size would need the memory of a
    model."""
    flat = [_as_real(array).reshape(-1) for array in arrays]
    return (tuple(array[first : first + BLOCK] for array in flat) for first in range(0, flat[0].size, BLOCK))


def furthest(want: Any, got: Any) -> tuple[int, ...]:
    """Returns the index at which two arrays differ most."""
    gap = _gap(want, got)
    return tuple(int(i) for i in np.unravel_index(np.nanargmax(np.where(np.isnan(gap), np.inf, gap)), gap.shape))


def _wide(array: Any) -> Any:
    """Values in the dtype of their kind with the most digits."""
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _shown(value: Any) -> float | str:
    """Returns a tensor's value as a divergence tells it."""
    return str(complex(value)) if np.iscomplexobj(value) else float(value)


def _as_real(array: Any) -> Any:
    """Returns complex numbers as twice as many real ones, and real ones as they are."""
    return np.stack((array.real, array.imag), -1) if np.iscomplexobj(array) else array
