"""Evaluates a training between its epochs, saves the best weights, and stops early (patience)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from samestep.errors import UserError, say
from samestep.job import Job
from samestep.rank.evaluate import evaluate, plain_model
from samestep.rank.watch import Watch
from samestep.rank.weights import StateDict, save
from samestep.records.record import EvaluationRecord
from samestep.world import World


@dataclass
class BestWeights:
    """Evaluates one training between its epochs and saves the best weights in the file `weights`.

    every: epochs between two evaluations; 0: only the one at the end. every_steps: optimizer steps between two
    evaluations, besides those between epochs; 0: none. best: the metric and its direction, 'min' or
    'max'; None saves the last weights. patience: how many evaluations without an improvement end the training; None:
    it runs to its end.
    """

    job: Job
    world: World
    steps: int
    weights: Path
    every: int = 1
    best: tuple[str, str] | None = None
    patience: int | None = None
    every_steps: int = 0
    watch: Watch | None = None  # is called after every evaluation
    saved: frozenset[str] | None = None  # the names of the tensors to save; None: all of them
    curve: list[dict[str, float]] = field(default_factory=list)
    best_at: int = -1  # index of the best evaluation in the curve
    ended: bool = False  # whether patience has ended the training
    evaluated: EvaluationRecord | None = None  # the latest evaluation's part of the record
    _unsaved: tuple[int, StateDict] | None = None  # the best step and its state, while the disk takes no file

    def begin(self, state: Callable[[], StateDict]) -> None:
        """Registers `state`, which returns the full state dict on rank 0. Every rank must call it."""
        self._state = state

    def is_due(self, done: int, steps_per_epoch: int) -> bool:
        """Returns whether to evaluate after `done` steps. Not after the last one: add() evaluates that."""
        apart = [self.every * steps_per_epoch, self.every_steps]
        return done < self.steps and any(steps and done % steps == 0 for steps in apart)

    def evaluate(self, done: int) -> bool:
        """Evaluates after `done` steps; every rank must call it. Returns whether patience ends the training."""
        # It draws random numbers. That changes no training: each micro-batch seeds the generator anew.
        self.add(done, self._state())
        self.ended = self.patience is not None and len(self.curve) - 1 - self.best_at >= self.patience
        return self.ended

    def means(self) -> Mapping[str, float]:
        """Returns the latest evaluation's figures."""
        return self.curve[-1]

    def state_dict(self) -> StateDict:
        """Returns the evaluations so far, for a checkpoint."""
        return {"curve": self.curve, "best_at": self.best_at, "ended": self.ended}

    def load_state_dict(self, state: StateDict) -> None:
        """Takes the evaluations of a checkpoint."""
        self.curve, self.best_at, self.ended = state["curve"], state["best_at"], state["ended"]

    def forget_best(self) -> None:
        """Lets the next evaluation be the best one: those so far are of other data."""
        self.best_at = -1

    def files(self) -> list[Path]:
        """Returns the file of the best weights, where there is one."""
        return [self.weights] if self.best is not None and self.curve else []

    def add(self, done: int, state: StateDict, *, last: bool = False) -> None:
        """Evaluates rank 0's `state` after `done` steps, and saves it if it is the best.

        last: the training has ended; the state is saved if `best` is None or nothing was evaluated before.
        """
        entry: dict[str, float] = {"step": done}
        writes = self.world.rank == 0
        if writes and last and (self.best is None or not self.curve):
            self._must_save(done, state)  # before evaluating: if that fails, the weights are on the disk
        if self.job.evaluation is not None:
            evaluation = evaluate(self.job, plain_model(self.job, state, self.world), self.world)
            entry |= evaluation.means()
            self.evaluated = evaluation.record()
            if self.watch:
                self.watch.evaluation(done, evaluation.means())
        better = self.best_at < 0 or self.best is None or _better(entry, self.curve[self.best_at], *self.best)
        self.curve.append(entry)
        if better:
            self.best_at = len(self.curve) - 1
            if writes and self.best is not None:
                self._save(done, state)

    def finish(self) -> None:
        """Saves the best weights, where the disk was full when they were found. Raises UserError where it still is."""
        if self._unsaved:
            self._must_save(*self._unsaved)

    def _save(self, done: int, state: StateDict) -> None:
        """Saves the best weights so far. Where they cannot be written, the training goes on with a copy in memory."""
        try:
            save(state, self.weights, self.saved)
            self._unsaved = None
        except UserError as error:
            self._unsaved = (
                done,
                {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)},
            )
            say(f"{error}; the best weights, of step {done}, stay in memory, and the training goes on")

    def _must_save(self, done: int, state: StateDict) -> None:
        try:
            save(state, self.weights, self.saved)
        except UserError as error:
            raise UserError(
                f"{error}; the weights of step {done} are lost: free some disk space, and train again"
            ) from error


def _better(new: Mapping[str, float], old: Mapping[str, float], name: str, direction: str) -> bool:
    after, before = new.get(name, math.nan), old.get(name, math.nan)
    if math.isnan(before):
        return not math.isnan(after)
    return after > before if direction == "max" else after < before
