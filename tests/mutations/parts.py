"""Where a planted fault is found: the proof on parts of its mesh, on ranks that are kept between proofs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mutations.faults import Fault
from ranks import Ranks, RanksFailed, engine_facts
from samestep.message import Message, as_said, message
from samestep.proof.axes import (
    notes_outputs,
    origin_of,
    part_layout,
    part_trainings,
    planned_on_part,
    trial_of,
    tried_axes,
    with_module,
)
from samestep.proof.trace import Expectation
from samestep.records.origin import AxisTrial, Origin
from samestep.records.plan import Plan, ReferencePlan, Subset
from samestep.records.record import Record
from samestep.records.results import Verdict
from samestep.world.mesh import Mesh


def reason(error: RanksFailed) -> Message:
    """Why ranks have failed, as a launch says it: by the last line that they have printed."""
    return message("rank_failed", rank=0, why=as_said(str(error).splitlines()[-1]), log="")


class Parts(ExitStack):
    """A planted fault on the parts of its mesh. source: of the package with the fault. reference_rank: plays them.

    A context manager; its ranks have ended when it ends.
    """

    def __init__(self, fault: Fault, source: Path, reference_rank: Ranks, *, threads: bool) -> None:
        super().__init__()
        self.fault, self.source, self.reference_rank, self.threads = fault, source, reference_rank, threads

    def origin(self, plan: Plan, size: int, verdict: Verdict) -> Origin:
        """Where what the proof has found arises. plan: of the proof. size: the study's number of replicas."""
        assert plan.mesh
        parts, asked = plan.mesh.parts, part_trainings(verdict, plan.trainings)
        facts = {part: engine_facts(plan.engine, part.size, self.fault.settings, part) for part in parts}
        layouts = {part: part_layout(facts[part], verdict, Subset(8, size)) for part in parts}
        numbers = {layout: number for number, layout in enumerate(dict.fromkeys(layouts.values()))}
        noted = notes_outputs(asked)
        reference = self.reference_rank.played(
            ReferencePlan("", 0.0, plan.job, {}, tuple(numbers), steps=8, replicas=size, notes_outputs=noted)
        )
        played = {part: Expectation(reference, numbers[layouts[part]]) for part in parts}
        records: dict[Mesh, Record] = {}

        def tried(part: Mesh) -> AxisTrial:
            def train() -> Record | Message:
                tasks = planned_on_part(asked, played[part], is_whole=part == plan.mesh)
                ranks = Ranks(part.size, self.source, engine=plan.engine, threads=self.threads)
                self.enter_context(ranks)
                try:
                    records[part] = ranks.work(replace(plan, trainings=tasks, mesh=part))
                except RanksFailed as error:
                    return reason(error)
                return records[part]

            return trial_of(part, facts[part], verdict, played[part], train)

        origin = origin_of(tried_axes(plan.mesh, tried))
        return with_module(origin, verdict, played[plan.mesh], records.get(plan.mesh))
