"""Proves a training that is wrong again on parts of its mesh, with the launcher that it was proven with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from samestep.commands.inspected_setup import InspectedSetup
from samestep.errors import TrainingFailed, UserError
from samestep.message import Message, message
from samestep.proof.axes import (
    notes_outputs,
    origin_of,
    part_layout,
    part_trainings,
    planned_on_part,
    trial_of,
    tried_axes,
    why_not_by_axes,
    with_module,
)
from samestep.proof.trace import Expectation
from samestep.records.inspection import EngineFacts
from samestep.records.origin import AxisTrial, Origin
from samestep.records.plan import Plan, ReferencePlan, Subset
from samestep.records.record import Record
from samestep.records.results import Verdict
from samestep.world.mesh import Mesh

MOST_PARTS = 8  # the most parts of a mesh that are tried: all of three axes
SECONDS_OF_ONE = 60.0  # after so many seconds a launch on a part is ended, and its result stays unknown

# Starts what a plan says, and returns its record. facts: of the engine; None: the reference.
Start = Callable[[Plan | ReferencePlan, EngineFacts | None], Record]


def with_origin(inspected: InspectedSetup, verdict: Verdict, plan: Plan, start: Start) -> Verdict:
    """Returns a verdict with the axes of the mesh along which its training is wrong; as it is where no axes were.

    plan: of the launch that the verdict is on. Ranks of several machines are not started again.
    """
    if verdict.verdict not in ("differs", "failed") or plan.mesh is None or plan.mesh.size == 1:
        return verdict
    why = why_not_by_axes(verdict) or (message("machines_try_no_axes") if inspected.machines.nnodes > 1 else None)
    if why:
        return replace(verdict, origin=Origin(said=(message("axes_not_tried", why=why),)))
    try:
        parts = Parts(inspected, verdict, plan, start)
        origin = origin_of(tried_axes(plan.mesh, parts.tried), is_failure=verdict.verdict == "failed")
        return replace(verdict, origin=with_module(origin, verdict, parts.played(plan.mesh), parts.whole))
    except (UserError, TrainingFailed):  # the verdict stays as it is, without an origin
        return verdict


class Parts:
    """The parts of the mesh of a training that is wrong, each with what the reference played of it."""

    def __init__(self, inspected: InspectedSetup, verdict: Verdict, plan: Plan, start: Start) -> None:
        assert plan.mesh
        self.verdict, self.plan, self.start = verdict, plan, start
        self.trainings = part_trainings(verdict, plan.trainings)
        self.whole: Record | None = None  # of the trial on the whole mesh
        self.trials = 0
        known = {part: inspected.inspection.part(plan.engine, part) for part in plan.mesh.parts}
        self.facts = {part: facts for part, facts in known.items() if facts}
        self.reference = self._reference(inspected)

    def _reference(self, inspected: InspectedSetup) -> Record:
        """Plays the training as each part has it; parts with as many replicas share a layout."""
        proof = inspected.job.proof
        subset = Subset(proof.steps, inspected.size, proof.rows)
        layouts = [part_layout(facts, self.verdict, subset) for facts in self.facts.values()]
        self.numbers = dict(zip(self.facts, map([*dict.fromkeys(layouts)].index, layouts)))
        return self.start(
            ReferencePlan(
                f"{self.plan.out}-parts/reference",
                time.time(),
                self.plan.job,
                self.plan.settings,
                layouts=tuple(dict.fromkeys(layouts)),
                steps=proof.steps,
                replicas=inspected.size,
                rows=proof.rows,
                extremes=proof.extremes,
                noise_runs=1,
                threads=inspected.setup.machines.threads or (0 if proof.costly else 1),
                notes_outputs=notes_outputs(self.trainings),
            ),
            None,
        )

    def played(self, part: Mesh) -> Expectation:
        """Returns what the reference played of a part."""
        return Expectation(self.reference, self.numbers[part])

    def tried(self, part: Mesh) -> AxisTrial:
        """Proves the training on one part."""
        axes, facts = (*part.sizes,), self.facts.get(part)
        if facts is None:
            return AxisTrial(axes, str(part), None, message("part_not_inspected"))
        if self.trials == MOST_PARTS:
            return AxisTrial(axes, str(part), None, message("enough_parts_were_tried", most=MOST_PARTS))
        self.trials += 1
        played, is_whole = self.played(part), part == self.plan.mesh

        def train() -> Record | Message:
            plan = replace(
                self.plan,
                out=str(Path(f"{self.plan.out}-parts") / (str(part).replace(",", "-") or "one-rank")),
                started_at=time.time(),
                engine_settings=facts.settings,
                trainings=planned_on_part(self.trainings, played, is_whole=is_whole),
                mesh=part,
            )
            try:
                record = self.start(plan, facts)
            except (UserError, TrainingFailed) as error:
                return error.message
            self.whole = record if is_whole else self.whole
            return record

        return trial_of(part, facts, self.verdict, played, train)
