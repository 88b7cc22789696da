"""How a script's ranks are arranged, and divide the model: tried when it is written, and constants in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samestep.engine import Engine
from samestep.job import Job
from samestep.rank.stage_plan import StagePlan, ranks_of_stages, stage_plan
from samestep.rank.tensor_plan import division_of
from samestep.tasks.eject import runtime
from samestep.tasks.eject.literals import literal
from samestep.tasks.eject.prune import PRESENT
from samestep.world import World
from samestep.world.mesh import OF_REPLICAS, Mesh

RUNTIME = runtime.__name__


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline. rank_of: of each, the place of its rank. micro_batches: the fewest of a step."""

    plan: StagePlan
    rank_of: list[int]
    micro_batches: int


@dataclass(frozen=True)
class Divided:
    """How a script's ranks are arranged, and divide the model. layers: layer -> style. changed: layers whose output the
    model changes in place. stages: None where there is no pipeline."""

    mesh: Mesh
    layers: Mapping[str, str]
    changed: tuple[str, ...]
    stages: Stages | None

    @classmethod
    def by_trial(cls, job: Job | None, mesh: Mesh, engine: Engine, settings: Mapping[str, Any]) -> Divided:
        """Tries how the ranks divide the model. Raises UserError where they cannot."""
        is_pipeline = "stage" in engine.axes
        if mesh.tensor == 1 and not is_pipeline:
            return cls(mesh, {}, (), None)
        assert job is not None
        if is_pipeline:
            world = World(size=mesh.size, mesh=mesh)
            assert engine.checks.divides
            engine.checks.divides(job, world, **settings)
            rank_of = ranks_of_stages(settings["schedule"], mesh.stage, settings["stages_per_rank"])
            fewest = engine.layout(world, **settings).micro_batches
            return cls(mesh, {}, (), Stages(stage_plan(job, len(rank_of)), rank_of, fewest))
        division = division_of(job, mesh.tensor)
        return cls(mesh, division.plan, tuple(sorted(division.changed)), None)

    @property
    def sharing(self) -> int:
        """How many ranks have the same rows."""
        return self.mesh.size // self.mesh.replicas

    @property
    def values(self) -> dict[str, Any]:
        """What an engine's loop asks of the mesh."""
        sizes = {axis: getattr(self.mesh, axis) for axis in (*OF_REPLICAS, "tensor")}
        return {
            "world.mesh": PRESENT,
            **{f"world.mesh.{axis}": size for axis, size in sizes.items()},
            **{f"ranks['{axis}'].size()": size for axis, size in sizes.items()},
        }

    @property
    def texts(self) -> dict[str, str]:
        """Expressions of a script that are others where the ranks of a replica are no neighbours: those of stages."""
        return {"world.rank // SHARING": "world.rank % (world.size // SHARING)"} if self.stages else {}

    def written(self, module: str, text: str) -> str:
        """Returns the text of a module of runtime/ with what is known here as its constants."""
        layers = "".join(f"    {literal(layer)}: {literal(style)},\n" for layer, style in self.layers.items())
        constants = {
            "SHARING = 1 ": f"SHARING = {self.sharing} ",
            "MESH: dict[str, int] = {}": f"MESH: dict[str, int] = {literal(self.mesh.sizes)}",
            "PLAN: dict[str, str] = {}  #": f"PLAN: dict[str, str] = {{\n{layers}}}  #",
            "CHANGED: tuple[str, ...] = ()": f"CHANGED: tuple[str, ...] = {literal(self.changed)}",
            **(self._constants_of_stages(self.stages) if self.stages else {}),
        }
        for constant, value in constants.items() if module.startswith(RUNTIME) else ():
            text = text.replace(constant, value)
        return text

    @staticmethod
    def _constants_of_stages(stages: Stages) -> dict[str, str]:
        plan = stages.plan
        cuts = "".join(f"    {cut!r},\n" for cut in plan.cuts)
        holders = "".join(f"    {literal(name)}: {literal(held)},\n" for name, held in plan.holders.items())
        return {
            "FEWEST = 1 ": f"FEWEST = {stages.micro_batches} ",
            "RANK_OF: list[int] = []": f"RANK_OF: list[int] = {literal(stages.rank_of)}",
            "CUTS: tuple[Cut, ...] = ()": f"CUTS: tuple[Cut, ...] = (\n{cuts})",
            "HOLDERS: dict[str, tuple[int, ...]] = {}": f"HOLDERS: dict[str, tuple[int, ...]] = {{\n{holders}}}",
            "DRAWS = False": f"DRAWS = {plan.draws}",
            "CHANGES_ROWS = False": f"CHANGES_ROWS = {plan.changes_rows}",
        }
