"""Makes the records of what the reference has played."""

from __future__ import annotations

from dataclasses import dataclass

from samestep import reference
from samestep.job import ByLength, Job, Lanes
from samestep.records.plan import LifeOptions, ProveTask
from samestep.records.reference_record import ReferenceLifeRecord, ReferenceTrainingRecord
from samestep.tasks.proof_job import steps_of
from samestep.tasks.reference_tensors import distances


@dataclass(frozen=True)
class ModelFacts:
    """The untrained model. digests: of its weights and buffers. parameters: their names."""

    digests: list[str]
    parameters: list[str]


def training_record(
    result: reference.TrainingResult,
    job: Job,
    training: ProveTask,
    facts: ModelFacts,
    base: reference.TrainingResult | None = None,
) -> ReferenceTrainingRecord:
    """Returns the record of one training of the proof's `job`. base: of one with noise, the training as it is."""
    steps = steps_of(training, job, reference.per_epoch(job))
    return ReferenceTrainingRecord(
        micro_batches=result.micro_batches,
        later=result.later,
        rates=result.rates,
        norms=result.norms,
        draws=result.draws,
        start_digests=facts.digests,
        parameters=facts.parameters,
        length=len(job.train),
        clip_norm=job.clip_norm,
        each_once=job.order is None or isinstance(job.order, ByLength | Lanes),
        phases=max(1, len(job.phases)),
        schedule=list(steps),
        evaluation=result.evaluation,
        distances=distances(base.state, result.state) if base else {},
        life=_life(result.life, base.life if base else None) if result.life else None,
    )


def _life(life: reference.Life, base: reference.Life | None) -> ReferenceLifeRecord:
    """Returns the record of a run's life. base: of one with noise, the run as it is."""
    tensors = life.tensors()
    return ReferenceLifeRecord(
        every=life.every,
        stop=life.stop,
        steps=life.steps,
        at_step=life.at_step,
        evaluations=life.evaluations,
        before=life.before,
        best_at=life.best_at,
        options=LifeOptions(life.best, life.best_after, predictions=bool(life.outputs)),
        parameters=life.parameters,
        distances={kind: distances(state, tensors[kind]) for kind, state in base.tensors().items()} if base else {},
    )
