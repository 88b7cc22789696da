"""Replays a training that differs with candidate faults, and measures how much of the difference each explains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from samestep import reference
from samestep.bounds import HOPELESS, TRIED_RATE_APART
from samestep.job import Job
from samestep.message import Message
from samestep.records.plan import LayoutPlan, ReferencePlan, Suspect
from samestep.records.tensor_files import read_arrays
from samestep.records.trial import Trial
from samestep.reference.faulty_training import HEALTHY, FaultyTraining, Hypothesis, Moment
from samestep.reference.hypotheses import Found, Steps, hypotheses, steps_to_act_at
from samestep.tasks.inspect.dry_run import counted_flop
from samestep.tasks.inspect.load import build
from samestep.tasks.play_reference import interruption_of_layout, layout_of, repeatability
from samestep.tasks.proof_job import OF_PARAMETER, proof_job, steps_of
from samestep.tasks.reference_tensors import distance
from samestep.world import World

STEPS_AFTER = 2  # the first one that differs, which are compared too
# Floating-point operations of all replays, some 40 s in float64 on one core. A number, and no time: the same faults are
# tried on every machine.
MOST_FLOP = 100e9
OF_STEP = 50e6  # what a step takes whose model is small, as so many: some 20 ms


def try_hypotheses(plan: ReferencePlan, world: World) -> list[Trial]:
    """Replays the plan's suspect with each hypothesis that can act on it, the simplest first, as long as it
    may take more steps."""
    assert plan.suspect
    replay = Replay(build(plan.job, plan.settings, compiled=False), plan.suspect, plan.layouts[0], world)
    return list(replay.trials())


class Replay:
    """A training that differs, and what was found of it."""

    def __init__(self, job: Job, suspect: Suspect, planned: LayoutPlan, world: World) -> None:
        self.suspect, self.layout, self.world = suspect, layout_of(planned), world
        self.job = proof_job(job, suspect.training)
        self.steps = steps_of(suspect.training, self.job, reference.per_epoch(self.job))
        self.ends_at = min(len(self.steps), suspect.step + STEPS_AFTER + 1)
        self.next_layout = layout_of(planned.then) if planned.then else None
        self.next_layout_from = interruption_of_layout(self.job, suspect.training, planned, len(self.steps))
        repeated = repeatability(self.job, world.device, checked=False)
        self.moved, self.changed = repeated.moved, repeated.changed
        self.tensors = self._tensors() if self.ends_at == len(self.steps) else FoundTensors()
        self.losses = FoundLosses(suspect)
        self.steps_taken = 0

    def trials(self) -> Iterator[Trial]:
        """Yields a trial for each hypothesis and the steps at which it may act, in the order in which they are tried.
        What is explained is not tried with more steps."""
        most, moments = self._most_steps(), list(self._moments())
        is_gradient = self.suspect.training.training == "gradient"
        found = Found(
            factor=self.tensors.factor() if is_gradient else None,
            tensors=self.tensors.wrong(),
            relative=0.0 if is_gradient else self.losses.relative(),
            changed=self.changed,
        )
        possible = [
            (number, hypothesis, steps)
            for hypothesis in hypotheses(
                self.job, self.layout, self.suspect.training.training, self.suspect.quantity, found
            )
            for number, steps in enumerate(
                steps_to_act_at(hypothesis, moments, self.suspect.step, closure=self.job.optimizer.needs_closure)
            )
        ]
        explained_at = math.inf
        for number, hypothesis, steps in sorted(possible, key=lambda row: row[0]):
            if number > explained_at:
                return
            unexplained = rounding = None
            if self.steps_taken < most:
                unexplained, rounding = self._tried(hypothesis, steps)
            cause, where = Message(hypothesis.id, dict(hypothesis.fields)), Message(steps.id, dict(steps.fields))
            trial = Trial(cause, where, unexplained, rounding or 0.0, hypothesis.general)
            yield trial
            if trial.explains:
                explained_at = number

    def _most_steps(self) -> int:
        """Returns how many steps all replays may take, by what the first step takes without a fault."""
        training = FaultyTraining(self.job, self.layout, self.world.device, HEALTHY, lambda moment: False, self.moved)
        _, flop = counted_flop(lambda: training.step(0, self.steps[0]))
        parameters = sum(tensor.numel() for tensor in training.final_state().values())
        return math.ceil(MOST_FLOP / (flop + OF_PARAMETER * parameters + OF_STEP))

    def _moments(self) -> Iterator[Moment]:
        length, epoch = reference.per_epoch(self.job), -1
        for step, schedule_step in enumerate(self.steps):
            begins = step > 0 and schedule_step // length != epoch
            epoch = schedule_step // length
            yield Moment(step, schedule_step, epoch, begins, (schedule_step + 1) % length == 0)

    def _tensors(self) -> FoundTensors:
        (folder, name), (expected_folder, expected_name) = self.suspect.tensors
        found, expected = (
            {
                tensor: torch.from_numpy(array)
                for tensor, array in read_arrays(Path(where), 0, what).items()
                if tensor in self.suspect.tensor_bounds
            }
            for where, what in ((folder, name), (expected_folder, expected_name))
        )
        start = {name: t.detach() for name, t in self.job.model().state_dict().items() if name in found}
        return FoundTensors(found, expected, start, self.suspect.tensor_bounds)

    def _tried(self, hypothesis: Hypothesis, steps: Steps) -> tuple[float | None, float]:
        """Replays the training. Returns what stays unexplained, and the share that rounding may leave."""
        try:
            training = FaultyTraining(self.job, self.layout, self.world.device, hypothesis, steps.includes, self.moved)
            for step, _ in training.steps(self._counted_steps(), self.next_layout, self.next_layout_from):
                unexplained, rounding = self.losses.unexplained(training, step)
                unexplained = max(unexplained, self._rates_unexplained(training.rates, len(training.norms)))
                if unexplained > HOPELESS:
                    return unexplained, rounding
            if self.tensors.found:
                of_tensors, rounding_of_tensors = self.tensors.unexplained(training.final_state())
                return max(unexplained, of_tensors), max(rounding, rounding_of_tensors)
        except Exception:  # a fault may make what the job cannot train: it does not explain what was trained
            return None, 0.0
        return unexplained, rounding

    def _counted_steps(self) -> Iterator[int]:
        for scheduled_step in self.steps[: self.ends_at]:
            self.steps_taken += 1
            yield scheduled_step

    def _rates_unexplained(self, rates: list[list[float]], steps: int) -> float:
        """The same of the learning rates, which must be those that were found."""
        found = [rate for group in self.suspect.rates[: len(rates)] for rate in group]
        replayed = [rate for group in rates for rate in group]
        if len(replayed) != len(found):
            return 1.0
        off = math.dist(replayed, found)
        if off <= TRIED_RATE_APART * math.hypot(*found):
            return 0.0
        expected = [rate for group in self.suspect.expected_rates[: len(rates)] for rate in group]
        difference = math.dist(expected, found) if len(expected) == len(found) else 0.0
        return off / difference if difference else 1.0


class FoundLosses:
    """The losses that were found, beside those of the reference."""

    def __init__(self, suspect: Suspect) -> None:
        self.suspect = suspect

    def relative(self) -> float:
        """How far the first losses that differ are off, as a share of their size."""
        first = [
            abs(found - expected) / abs(expected)
            for process, steps in enumerate(self.suspect.steps_of)
            for step, found, expected in zip(steps, self.suspect.found[process], self.suspect.expected[process])
            if step == self.suspect.step and expected
        ]
        return max(first, default=0.0)

    def unexplained(self, training: FaultyTraining, step: int) -> tuple[float, float]:
        """Returns how far the losses up to `step` are from those that were found, and what rounding allows, both as
        shares of the difference from the first step on that differs. Before that step none is allowed."""
        off, differences, bounds = [0.0], [], []
        for process, steps in enumerate(self.suspect.steps_of):
            replayed = _of_process(training, process, len(self.suspect.steps_of))
            rows = zip(steps, self.suspect.found[process], self.suspect.expected[process], replayed)
            for number, found, expected, again in rows:
                if number > step:
                    break
                bound = self.suspect.bounds[number]
                left = abs(again - found)
                off.append(left if left > bound else 0.0)
                if number >= self.suspect.step and abs(found - expected) > bound:
                    differences.append(found - expected)
                    bounds.append(bound)
        difference = math.hypot(*differences)
        if not difference:
            return (math.inf if any(off) else 0.0), 0.0
        return math.hypot(*off) / difference, math.hypot(*bounds) / difference


def _of_process(training: FaultyTraining, process: int, processes: int) -> list[float]:
    """The losses of a process, times the weights of their rows, in the order of its micro-batches."""
    size = training.most_replicas // processes
    replicas = [training.micro_batches[replica] for replica in range(process * size, (process + 1) * size)]
    return [
        sum((micro_batch.loss or 0.0) * micro_batch.weight for micro_batch in micro_batches)
        for micro_batches in zip(*replicas)
    ]


@dataclass(frozen=True)
class FoundTensors:
    """The tensors after the last step as they were found, as the reference left them, and as they began."""

    found: dict[str, Tensor] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)

    def unexplained(self, state: dict[str, Tensor]) -> tuple[float, float]:
        """As of FoundLosses."""
        left, difference, rounding = 0.0, 0.0, 0.0
        for name, found in self.found.items():
            bound = self.bounds[name]
            if distance(state[name], found) > bound:
                left += _norm_of_difference(state[name], found) ** 2
            if distance(self.expected[name], found) > bound:
                difference += _norm_of_difference(self.expected[name], found) ** 2
                rounding += bound**2 * found.numel()
        if not difference:
            return (math.inf if left else 0.0), 0.0
        return math.sqrt(left / difference), math.sqrt(rounding / difference)

    def factor(self) -> float | None:
        """The number by which a first gradient is multiplied, if it is one number. The weights are those after a step
        of SGD with a rate of 1."""
        products = squares = 0.0
        for name, found in self.found.items():
            right = (self.start[name].to(found) - self.expected[name]).double()
            products += float((right * (self.start[name].to(found) - found).double()).sum())
            squares += float((right**2).sum())
        return products / squares if squares else None

    def wrong(self) -> list[str]:
        """The tensors that are wrong, where others are right."""
        wrong = [n for n, t in self.found.items() if distance(self.expected[n], t) > self.bounds[n]]
        return wrong if len(wrong) < len(self.found) else []


def _norm_of_difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())
