"""Compares the life of a run with the reference's: its losses, evaluations, restart, and the contents of its files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from samestep.bounds import LIFE_APART, LIFE_APART_IN_LOWER
from samestep.message import Message, message
from samestep.proof.compare import (
    Comparison,
    Outside,
    bound_of,
    distance,
    evaluation_bound,
    furthest,
    largest_of,
    times_bound,
)
from samestep.proof.plan import AS_OWN
from samestep.proof.trace import EPS, sample_like
from samestep.records.results import Divergence
from samestep.records.training_record import TrainingRecord

LIFE = "life"
# A relative distance: two figures closer than this are of the same evaluation, or order. It only names a cause.


def compare_life(comparison: Comparison) -> Iterator[Divergence]:
    """Yields the differences in the life of a run, in causal order."""
    life = LifeComparison(comparison)
    yield from life.steps()
    yield from life.losses_and_evaluations()
    yield from life.best()
    yield from life.last_weights()
    yield from life.saved()
    comparison.not_compared = life.notes


class LifeComparison:
    """The run of an engine beside that of the reference. notes: the parts of the run that cannot be compared."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, expectation = comparison, comparison.expectation
        played = expectation.facts.trainings[LIFE]
        lives = [training.life for training in played if training.life]
        self.want, *self.noisy = lives
        self.name = comparison.names.format(LIFE)  # the name of the whole life in the engine's record
        self.ranks = comparison.record.training(self.name)
        shape = comparison.processes, comparison.mesh
        self.traces = [expectation.trace(LIFE, number, *shape) for number in range(len(played))]
        self.notes: list[Message] = []
        self.alike = LIFE_APART if comparison.eps <= EPS["float64"] else LIFE_APART_IN_LOWER

    def steps(self) -> Iterator[Divergence]:
        """Yields the divergences of the numbers of steps: before the restart, after it, and of the last checkpoint."""
        for rank, training in enumerate(self.ranks):
            restart, want = training.restart, self.want
            assert restart
            if restart.stopped_at != want.stop:
                yield self._divergence(
                    "optimizer steps", want.stop, restart.stopped_at, "run_stopped_at_another_step", rank=rank
                )
            if restart.continued_at != want.stop:
                how = "training_began_anew" if restart.continued_at == 0 else "run_continued_at_another_step"
                yield self._divergence("resumed step", want.stop, restart.continued_at, how, rank=rank)
            if restart.done != want.steps:
                yield self._divergence(
                    "optimizer steps", want.steps, restart.done, "run_ended_at_another_step", rank=rank
                )
            if restart.saved_at not in (None, want.steps):
                yield self._divergence("optimizer steps", want.steps, restart.saved_at, "checkpoint_of_another_step")

    def losses_and_evaluations(self) -> Iterator[Divergence]:
        """Yields the divergences of each step's losses on the ranks, and of the evaluation after it."""
        bounds = self.comparison.loss_bounds(self.traces[0], self.traces[1:])
        at_step = {step: number for number, step in enumerate(self.want.at_step)}
        curves = [{int(entry["step"]): entry for entry in training.curve} for training in self.ranks]
        for step in range(self.want.steps):
            for rank, training in enumerate(self.ranks):
                yield from self._losses(step, rank, training, bounds[step])
            for rank, curve in enumerate(curves if step + 1 in at_step else ()):
                number = at_step[step + 1]
                if step + 1 not in curve:
                    cause = message("evaluation_left_out", steps=step + 1)
                    yield self._divergence("evaluation", self.want.at_step, [*curve], cause, step=step, rank=rank)
                else:
                    yield from self._evaluation(number, curve[step + 1], rank)
        for rank, curve in enumerate(curves):
            if [*curve] != (self.want.at_step or [self.want.steps]):
                cause = message("evaluation_at_another_step")
                yield self._divergence("evaluation", self.want.at_step, [*curve], cause, rank=rank)

    def _losses(self, step: int, rank: int, training: TrainingRecord, bound: float) -> Iterator[Divergence]:
        want = [micro_batch for micro_batch in self.traces[0].micro_batches[rank] if micro_batch.step == step]
        observed = zip(training.step_of, training.losses, training.weight_of)
        got = [(loss, weight) for loss_step, loss, weight in observed if loss_step == step]
        if len(got) != len(want):
            yield self._divergence("rows", len(want), len(got), self._cause_of_loss(step, []), step=step, rank=rank)
            return
        for micro_batch, (loss, weight) in zip(want, got):
            self.comparison.bitwise &= micro_batch.loss_sum == loss * weight
            difference = abs(micro_batch.loss_sum - loss * weight)
            if not difference <= bound:
                cause = self._cause_of_loss(step, [value for value, _ in got])
                times = times_bound(difference, bound)
                pair = micro_batch.mean_loss, loss
                yield self._divergence("loss", *pair, cause, step=step, rank=rank, times_bound=times)

    def _cause_of_loss(self, step: int, losses: list[float]) -> Message:
        """Names what happened just before the first step whose loss is wrong."""
        every, stop, saved = self.want.every, self.want.stop, self.want.checkpoint_every
        phases = self.comparison.expectation.of(LIFE).phases
        if step == 0:
            own_losses = [loss for replica in self.want.own_losses for loss in replica]
            loaded = not any(math.isclose(a, b, rel_tol=self.alike) for a in losses for b in own_losses if a)
            return message("first_loss_of_run_differs" if loaded else "init_not_loaded")
        if stop <= step < stop + phases:
            return message("wrong_since_restart", step=stop)
        if stop < step:
            return message("state_lost_at_restart", step=stop)
        if every <= step < every + phases:
            return message("wrong_since_evaluation", step=every)
        if saved <= step < saved + phases:
            return message("wrong_since_checkpoint", step=saved)
        return message("wrong_where_nothing_observes")

    def _evaluation(self, number: int, entry: Mapping[str, float], rank: int) -> Iterator[Divergence]:
        """Yields the divergences of one evaluation's figures."""
        want = self.want.evaluations[number]
        for name, total in want.sums.items():
            if name in self._unsteady():
                continue
            over, got = want.divisor(name), entry.get(name, math.nan)
            difference, bound = abs(total / over - got), self._bound(number, name)
            if not difference <= bound:
                step = self.want.at_step[number] - 1
                cause = self._cause_of_evaluation(number, name, got)
                times = times_bound(difference, bound)
                pair = total / over, got
                yield self._divergence("evaluation", *pair, cause, step=step, tensor=name, rank=rank, times_bound=times)

    def _cause_of_evaluation(self, number: int, name: str, got: float) -> Message:
        earlier = [*reversed(self.want.evaluations[:number]), *([self.want.before] if self.want.before else [])]
        if any(math.isclose(got, evaluation.mean(name), rel_tol=self.alike) for evaluation in earlier):
            return message("evaluation_of_earlier_weights")
        if self.want.at_step[number] > self.want.stop:  # the evaluations before the restart are right
            return message("state_lost_at_restart", step=self.want.stop)
        return message("evaluation_of_other_weights")

    def _unsteady(self) -> set[str]:
        return {name for evaluation in self.want.evaluations for name in evaluation.unsteady}

    def _bound(self, number: int, name: str) -> float:
        """Returns how far rounding explains that an evaluation's mean is off."""
        want = self.want.evaluations[number]
        noisy = [life.evaluations[number] for life in self.noisy]
        factor = self.comparison.expectation.disagreement(LIFE)
        return evaluation_bound(name, want.sums[name], noisy, self.comparison.eps, factor) / want.divisor(name)

    def best(self) -> Iterator[Divergence]:
        """Yields the divergence of which evaluation is the best one."""
        if self.want.options.best is None:
            return
        if not self._is_decided():
            self.notes.append(message("best_evaluation_not_compared"))
            return
        for rank, training in enumerate(self.ranks):
            if training.best_at != self.want.best_at:
                at_step = dict(enumerate(self.want.at_step))
                expected, found = (at_step.get(number, "none") for number in (self.want.best_at, training.best_at))
                is_worst = training.best_at == self._best_by_exchanged_directions()
                cause = message("best_by_wrong_direction" if is_worst else "another_evaluation_is_best")
                yield self._divergence("best evaluation", expected, found, cause, rank=rank)

    def _is_decided(self) -> bool:
        """Returns whether the figures that decide are further apart than rounding explains."""
        assert self.want.options.best
        name, best_at = self.want.options.best[0], self.want.best_at
        values = [evaluation.mean(name) for evaluation in self.want.evaluations]
        pairs = [(0, 1), *((best_at, number) for number in (1, 2, 3) if number != best_at)]
        return all(abs(values[a] - values[b]) > self._bound(a, name) + self._bound(b, name) for a, b in pairs)

    def _best_by_exchanged_directions(self) -> int:
        """Returns the number of the evaluation that would be the best one if the run maximised where it minimises."""
        options = self.want.options
        assert options.best and options.best_after
        values = [evaluation.mean(options.best[0]) for evaluation in self.want.evaluations]
        best_at = 0
        for number, value in enumerate(values):
            direction = (options.best if number < 2 else options.best_after)[1]
            if value < values[best_at] if direction == "max" else value > values[best_at]:
                best_at = number
        return best_at

    def last_weights(self) -> Iterator[Divergence]:
        """Parameters, averages and each rank's buffers in the last checkpoint."""
        expectation, record = self.comparison.expectation, self.comparison.record
        want, got = expectation.arrays(LIFE), record.arrays(self.name)
        raw, got_raw = expectation.arrays(LIFE, ".raw"), record.arrays(f"{self.name}.raw")
        names, last = self.want.parameters, self.want.steps - 1
        if missing := [name for name in names if name not in got]:
            cause = message("names_of_weights_differ")
            yield self._divergence(
                "names of the weights", sorted(names), sorted(got), cause, step=last, tensor=missing[0]
            )
            return
        spread = expectation.noise_distances(LIFE)
        if raw:
            of_raw = self._distances(".raw")
            yield from self._tensors("parameter", raw, got_raw, of_raw, "last_update_wrong")
        quantity, cause_id = ("averaged weights", "average_wrong") if raw else ("parameter", "last_update_wrong")
        yield from self._tensors(quantity, {name: want[name] for name in names}, got, spread, cause_id)
        yield from self._buffers(want)

    def _buffers(self, want: Mapping[str, Any]) -> Iterator[Divergence]:
        """Yields the divergences of the buffers of each replica that has rows in each step: a replica without rows
        keeps its buffers until the next broadcast. Where one process has several replicas, those of the first are
        compared."""
        expectation, record = self.comparison.expectation, self.comparison.record
        replicas = expectation.facts.layout.replicas
        of_replicas = [expectation.arrays(LIFE, f".buffers{number}") for number in range(replicas)]
        # A state dict has no buffers that are not persistent; a checkpoint does.
        first = {**want, **of_replicas[0]}
        traced = self.traces[0].of_replicas
        steps = [{part.step for part in micro_batches if part.indices} for micro_batches in traced]
        for rank in range(replicas if replicas <= self.comparison.processes else 1):
            if steps[rank] != set().union(*steps):
                continue
            got = record.arrays(f"{self.name}.buffers{rank}")
            expected = {name: of_replicas[rank].get(name, first.get(name)) for name in got}
            known = {name: value for name, value in expected.items() if value is not None}
            for difference in self.comparison.outside(LIFE, known, got, self._distances(f".buffers{rank}")):
                name, found = difference.name, difference.observed
                other_ranks = [
                    number
                    for number, buffers in enumerate(of_replicas)
                    if number != rank and self._alike(buffers.get(name, first.get(name)), found)
                ]
                cause = message("buffers_synchronised_in_another_way")
                if other_ranks:
                    cause = message("buffers_of_another_rank", rank=other_ranks[0])
                yield self._difference("buffer", difference, cause, rank=rank)

    def saved(self) -> Iterator[Divergence]:
        """Yields the divergences of the weights that are saved, and of what they predict."""
        expectation, record = self.comparison.expectation, self.comparison.record
        if self.want.options.best and not self._is_decided():
            return
        want, got = expectation.arrays(LIFE, ".saved"), record.arrays(f"{self.name}.saved")
        if sorted(want) != sorted(got):
            cause = message("names_of_weights_differ" if got else "weights_not_in_their_file")
            yield self._divergence("names of the weights", sorted(want), sorted(got), cause)
            return
        for difference in self.comparison.outside(LIFE, want, got, self._distances(".saved")):
            yield self._difference("saved weights", difference, self._cause_of_saved(got))
        outputs, found = (
            side.get("outputs")
            for side in (expectation.arrays(LIFE, ".outputs"), record.arrays(f"{self.name}.outputs"))
        )
        if outputs is None:
            if self.want.evaluations:
                self.notes.append(message("predictions_not_compared"))
            return
        yield from self._predictions(outputs, found)

    def _cause_of_saved(self, got: Mapping[str, Any]) -> Message:
        """Looks for the evaluation whose weights were saved."""
        for number, step in enumerate(self.want.at_step):
            sample = self.comparison.expectation.arrays(LIFE, f".evaluated{number}")
            if all(self._alike(sample[name], sample_like(got[name], sample[name])) for name in got):
                return message("saved_weights_of_another_evaluation", steps=step)
        return message("saved_weights_of_no_evaluation")

    def _predictions(self, want: Any, got: Any) -> Iterator[Divergence]:
        if got is not None and got.shape == want.shape:
            spread = max(life.distances[".outputs"]["outputs"] for life in self.noisy)
            if distance(want, got) <= bound_of(spread, self.comparison.eps, largest_of(want), 0.0, 0.0):
                return
            rows = [np.sort(side.reshape(len(side), -1).sum(1, dtype=np.float64)) for side in (want, got)]
            ordered = self._alike(*rows)
            cause = message("predictions_in_another_order" if ordered else "predictions_differ")
            yield self._difference("predictions", Outside("", want, got, None), cause)
            return
        shape = "none" if got is None else list(got.shape)
        yield self._divergence("predictions", list(want.shape), shape, message("predictions_differ"))

    def _alike(self, want: Any, got: Any) -> bool:
        if want is None or want.shape != got.shape:
            return False
        return bool(np.allclose(want, got, rtol=self.alike, atol=self.alike * largest_of(want), equal_nan=True))

    def _tensors(
        self, quantity: str, want: Mapping[str, Any], got: Mapping[str, Any], spread: Mapping[str, float], cause_id: str
    ) -> Iterator[Divergence]:
        for difference in self.comparison.outside(LIFE, want, got, spread):
            yield self._difference(quantity, difference, Message(cause_id))

    def _distances(self, kind: str) -> dict[str, float]:
        """Returns tensor -> how far rounding alone moves it."""
        noisy = [life.distances[kind] for life in self.noisy]
        return {name: max(distances[name] for distances in noisy) for name in (noisy[0] if noisy else ())}

    def _difference(self, quantity: str, difference: Outside, cause: Message, rank: int | None = None) -> Divergence:
        name, want, got, times = difference
        index = furthest(want, got)
        pair = float(want[index]), float(got[index])
        step, tensor = self.want.steps - 1, name or None
        return self._divergence(quantity, *pair, cause, step=step, tensor=tensor, rank=rank, times_bound=times)

    def _divergence(
        self,
        quantity: str,
        expected: Any,
        found: Any,
        cause: str | Message,
        *,
        step: int | None = None,
        tensor: str | None = None,
        rank: int | None = None,
        times_bound: float | None = None,
    ) -> Divergence:
        said = Message(cause) if isinstance(cause, str) else cause
        if self.name == AS_OWN.format(LIFE):
            said = message("wrong_in_own_dtype_alone", dtype=self.comparison.expectation.facts.dtype, cause=said)
        expected, found = _plain(expected), _plain(found)
        return Divergence(
            LIFE,
            step,
            quantity,
            tensor=tensor,
            rank=rank,
            expected=expected,
            found=found,
            cause=said,
            name=self.name,
            times_bound=times_bound,
        )


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it, which knows no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
