"""The second number of ranks for which engines are proven: as replicas, or arranged in another mesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.engine import Layout
from samestep.job import Job
from samestep.records.inspection import SecondSize
from samestep.records.plan import ProveTask, second_size
from samestep.tasks.inspect.dry_run import Units, varying_calls
from samestep.tasks.inspect.engines import OnMesh
from samestep.tasks.inspect.refusals import refusal_of, try_to_divide
from samestep.tasks.proof_job import rows_of_proof


@dataclass(frozen=True)
class SecondSizes:
    """The second numbers of ranks of a job's proof."""

    job: Job
    """The job."""

    device: str
    """The device on which rows are tried."""

    training: ProveTask
    """A training of the proof on the first number of ranks."""

    forward_flop: float
    """The floating-point operations of one row's forward pass."""

    parameters: int
    """The number of elements of all the model's parameters."""

    units: Mapping[str, Units]
    """Engine -> what returns the modules of a model that its ranks gather."""

    def whole(self, also: int | None) -> SecondSize | None:
        """Returns the second number of ranks that are replicas; None where there is none. also: as of Question."""
        ranks = second_size(self.training.replicas, self.job.global_batch) if also is None else also
        return None if ranks in (0, self.training.replicas) else self._tried(Layout(ranks), ranks, self.units)

    def on_meshes(self, meshes: Mapping[str, Sequence[OnMesh]], undivided: Collection[str]) -> dict[str, SecondSize]:
        """Returns engine -> its second mesh.

        meshes: as EngineDemands.other_meshes. undivided: the engines that cannot divide the model on the first one.
        """
        return {
            name: self.on_mesh(name, candidates)
            for name, candidates in meshes.items()
            if candidates and name not in undivided
        }

    def on_mesh(self, engine: str, candidates: Sequence[OnMesh]) -> SecondSize:
        """Returns the first mesh on which the job can be trained, or the first one, with the reason why it cannot."""
        units, first = {name: units for name, units in self.units.items() if name == engine}, None
        for facts, divides in candidates:
            assert facts.layout
            why = try_to_divide(self.job, {engine: divides} if divides else {})[1].get(engine)
            if why:
                found = SecondSize(facts.processes, self.training.rows, {}, why, facts.mesh)
            else:
                found = replace(self._tried(facts.layout, facts.processes, units), mesh=facts.mesh)
            if found.refused is None:
                return found
            first = first or found
        assert first
        return first

    def _tried(self, layout: Layout, ranks: int, units: Mapping[str, Units]) -> SecondSize:
        """Returns a number of ranks, and whether the job can be trained on it."""
        job, rows, replicas, parts = self.job, self.training.rows, layout.replicas, layout.micro_batches
        if rows != job.global_batch:
            least = 2 * replicas * parts if parts > 1 else 0
            rows = rows_of_proof(job, ranks, self.forward_flop, self.parameters, least)[0]
        training = replace(self.training, replicas=ranks, rows=rows)
        refused = refusal_of(job, training, self.device, replicas, fewest=parts)
        calls = varying_calls(job, units, replicas, self.device)
        return SecondSize(ranks, rows, calls, refused)
