"""How a script's ranks are arranged, and divide the model: tried when it is written, and constants in it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from samestep.engine import Engine
from samestep.job import Job
from samestep.parallel.stage_plan import StagePlan, ranks_of_stages, stage_plan
from samestep.parallel.tensor_plan import division_of
from samestep.tasks.eject.literals import literal
from samestep.world import World
from samestep.world.mesh import Mesh


@dataclass(frozen=True)
class Divided:
    """How the ranks of a script divide the model. layers: layer -> style. changed: layers whose output the model
    changes in place. stages: None where there is no pipeline; rank_of: of each stage, the place of its rank."""

    layers: Mapping[str, str]
    changed: tuple[str, ...]
    stages: StagePlan | None = None
    rank_of: tuple[int, ...] = ()

    @classmethod
    def by_trial(cls, job: Job | None, mesh: Mesh, engine: Engine, settings: Mapping[str, Any]) -> Divided:
        """Tries how the ranks divide the model. Raises UserError where they cannot."""
        is_pipeline = "stage" in engine.axes
        if mesh.tensor == 1 and not is_pipeline:
            return cls({}, ())
        assert job is not None
        if is_pipeline:
            assert engine.checks.divides
            engine.checks.divides(job, World(size=mesh.size, mesh=mesh), **settings)
            rank_of = ranks_of_stages(settings["schedule"], mesh.stage, settings["stages_per_rank"])
            return cls({}, (), stage_plan(job, len(rank_of)), tuple(rank_of))
        division = division_of(job, mesh.tensor)
        return cls(division.plan, tuple(sorted(division.changed)))

    def written(self, script: str) -> str:
        """Returns the text of a script with what is known here as its constants."""
        layers = _lines(f"{literal(layer)}: {literal(style)}," for layer, style in self.layers.items())
        constants = {
            "PLAN: dict[str, str] = {}": f"PLAN: dict[str, str] = {{{layers}}}",
            "CHANGED: tuple[str, ...] = ()": f"CHANGED: tuple[str, ...] = {literal(self.changed)}",
        }
        if self.stages:
            cuts = _lines(f"{cut!r}," for cut in self.stages.cuts)
            held = _lines([" ".join(f"{literal(n)}: {literal(h)}," for n, h in self.stages.holders.items())])
            constants |= {
                "RANK_OF: list[int] = []": f"RANK_OF: list[int] = {[*self.rank_of]}",
                "CUTS: tuple[Cut, ...] = ()": f"CUTS: tuple[Cut, ...] = ({cuts})",
                "HOLDERS: dict[str, tuple[int, ...]] = {}": f"HOLDERS: dict[str, tuple[int, ...]] = {{{held}}}",
                "DRAWS = False": f"DRAWS = {self.stages.draws}",
                "CHANGES_ROWS = False": f"CHANGES_ROWS = {self.stages.changes_rows}",
            }
        for constant, value in constants.items():
            script = script.replace(constant, value)
        return script


def _lines(entries: Iterable[str]) -> str:
    """Returns the entries of a display on lines of their own, as many of a long entry's on one as it takes."""
    wrapped = [
        textwrap.fill(entry, 118, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
        for entry in entries
    ]
    return "\n".join(["", *wrapped, ""]) if wrapped else ""
