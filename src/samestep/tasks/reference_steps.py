"""How many steps the reference plays, and how many of them it has played, as the launch's progress."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from samestep.records.plan import LayoutPlan, ReferencePlan
from samestep.records.record import Progress, attempt, write_progress

EVERY_S = 0.5  # between two files of the progress


def noise_runs(plan: ReferencePlan, layout: LayoutPlan) -> int:
    """How often a layout's trainings are played again with noise. Where a step takes long, plain training is not: the
    bound is then that of the replicas' rounding alone, which is never wider."""
    if layout.compared and layout.replicas == 1 and plan.noise_runs == 1 and len(plan.layouts) > 1:
        return 0
    if layout.held_randomness:
        return 1
    return max(1, plan.noise_runs - 1) if layout.subset else plan.noise_runs


class StepsPlayed:
    """Counts the reference's steps, and writes them as the launch's progress."""

    def __init__(self, plan: ReferencePlan, rank: int) -> None:
        self.plan, self.rank, self.folder = plan, rank, Path(plan.out)
        self.done, self.total = 0, sum(self.planned(layout) for layout in plan.layouts)
        self.written_at = 0.0

    def planned(self, layout: LayoutPlan) -> int:
        """The steps of one layout's trainings."""
        again = {"gradient": 0 if layout.subset else 1}  # to check that it is deterministic
        times, steps = 1 + noise_runs(self.plan, layout), self.plan.subset_of(layout).steps
        return sum((times + again.get(name, 0)) * (1 if name == "gradient" else steps) for name in layout.trainings)

    def begin(self, training: str, layout: LayoutPlan) -> None:
        """Begins to play a training of a layout."""
        what = " without random numbers and batch statistics" if layout.held_randomness else ""
        self.phase = f"reference {training}, {layout.replicas} replica{'' if layout.replicas == 1 else 's'}{what}"
        self._write(self.phase)

    def after_step(self, step: int, steps: int) -> None:
        """Counts a step of a training of so many."""
        self.done += 1
        if time.monotonic() - self.written_at > EVERY_S:
            self._write(f"{self.phase}: step {step + 1} of {steps}")

    def skip(self, layouts: Iterable[LayoutPlan]) -> None:
        """Leaves out layouts that train as one that was played."""
        self.total -= sum(map(self.planned, layouts))

    def again(self, steps: int) -> None:
        """Adds the steps of a training that is played once more."""
        self.total += steps

    def _write(self, phase: str) -> None:
        self.written_at = time.monotonic()
        write_progress(self.rank, self.folder, Progress(phase, attempt(), self.done, max(self.total, self.done)))
