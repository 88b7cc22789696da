"""What cannot train a job: numbers of replicas whose batches it refuses, and engines that cannot divide its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.data.loader import Rows
from samestep.data.schedule import Schedule, schedule_of
from samestep.engine import Layout
from samestep.errors import UserError
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.rank.step import is_one_row_error, one_row_message
from samestep.records.plan import ProveTask
from samestep.tasks.inspect.dry_run import build_model, dry_step
from samestep.tasks.inspect.engines import Divides
from samestep.tasks.proof_job import proof_job
from samestep.world.foreign_code import error_line


@dataclass(frozen=True)
class TrainedSizes:
    """The sizes in which a job may be trained. The methods take a training of its proof; None: it is not proven."""

    job: Job
    """The job."""

    device: str
    """The device on which batches are tried."""

    replicas: Sequence[int]
    """The numbers of replicas."""

    in_parts: Mapping[str, Layout]
    """Engine -> its layout, of those whose steps have micro-batches of their own."""

    def refused_replicas(self, proven: ProveTask | None) -> dict[int, Message | None]:
        """Returns number of replicas -> why they cannot train the job; None: they can."""
        return {replicas: self._refusal(proven, replicas) for replicas in self.replicas}

    def refused_engines(self, proven: ProveTask | None) -> dict[str, Message]:
        """Returns engine -> why its own micro-batches cannot be trained."""
        found = {
            engine: self._refusal(proven, layout.replicas, layout.micro_batches)
            for engine, layout in self.in_parts.items()
        }
        return {engine: why for engine, why in found.items() if why}

    def are_refused_in_the_proof_alone(self, training: ProveTask) -> bool:
        """Returns whether the proof's last batch is refused, whose size the job's own batches do not have."""
        # With fewer rows than the job's batch, or with as many, it has no such batch.
        if training.rows:
            return False
        cuts = [(replicas, 1) for replicas in self.replicas]
        cuts += [(layout.replicas, layout.micro_batches) for layout in self.in_parts.values()]
        refused = [cut for cut in cuts if self._refusal(training, *cut)]
        return any(self._refusal(None, *cut) is None for cut in refused)

    def _refusal(self, proven: ProveTask | None, replicas: int, fewest: int = 1) -> Message | None:
        """Returns what refusal_of does."""
        return refusal_of(self.job, proven, self.device, replicas, fewest)


def refusal_of(job: Job, proven: ProveTask | None, device: str, replicas: int, fewest: int = 1) -> Message | None:
    """Returns why the job, or the job of the proof, cannot be trained on so many replicas; None where it can.

    proven: a training of the proof; None: the job is not proven. fewest: micro-batches of a step, as of Schedule.
    """

    def schedule(trained: Job) -> Schedule:
        return replace(schedule_of(trained, replicas), fewest=fewest)

    own_sizes = proven is not None and proven.rows == job.global_batch
    why = _refused_size(job, schedule(job), device) if own_sizes else None
    why = why or _layer_refusal(job, schedule(job))
    if why or proven is None:
        return why
    small = proof_job(job, proven)
    return _layer_refusal(small, schedule(small))


def _refused_size(job: Job, schedule: Schedule, device: str) -> Message | None:
    """Returns which rank's number of rows is refused by a job that takes only some; None where it takes all."""
    last, replicas = schedule.steps_per_epoch - 1, schedule.world_size
    for rank, step in ((0, 0), (replicas - 1, 0), (0, last), (replicas - 1, last)):
        try:
            dry_step(job, schedule, build_model(job), device, job.global_batch, at=(rank, step))
        except UserError as error:
            helps = "last=drop" if step and job.last == "keep" else None
            return message("job_refuses_a_number_of_rows", step=step, rank=rank, why=error.message, setting=helps)
    return None


def _layer_refusal(job: Job, schedule: Schedule) -> Message | None:
    """Returns why a layer refuses the smallest part of an epoch (one row, or none under SyncBatchNorm), or None."""
    synced = job.sync_batchnorm and schedule.world_size > 1
    rows, step, replica = schedule.smallest_micro_batch()
    if synced and (empty := schedule.without_rows()):
        return message("rank_without_rows_under_sync_batchnorm", step=empty[0], rank=empty[1])
    if rows > 1 or synced:
        return None
    micro_batch = next(p for p in schedule_of(job, 1).step(0, 0, 0))
    micro_batch = replace(micro_batch, indices=micro_batch.indices[:1], rows=1)
    _, data = Rows(job)[micro_batch]
    try:
        for number, turn in enumerate(job.of_phases()):
            turn.forward(job.model(), Batch(data, replace(micro_batch, phase=number)))
    except ValueError as error:
        if is_one_row_error(error):
            return one_row_message(step, replica, schedule.micro_batches, schedule.fewest)
    except Exception:
        return None  # other errors are raised again when it trains
    return None


def try_to_divide(job: Job, engines: Mapping[str, Divides]) -> tuple[dict[str, Message], dict[str, Message]]:
    """Has engines divide a job's model. Returns engine -> how its ranks divide it, and engine -> why they cannot."""
    divided, undivided = dict[str, Message](), dict[str, Message]()
    for engine, divides in engines.items():
        try:
            if said := divides(job):
                divided[engine] = said
        except UserError as error:
            undivided[engine] = error.message
        except Exception as error:
            # Of one engine, which must not hide what the others say.
            undivided[engine] = message("plan_cannot_be_tried", engine=engine, error=error_line(error))
    return divided, undivided
