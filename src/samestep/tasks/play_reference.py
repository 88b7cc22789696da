"""Plays the reference for every layout of a plan, and writes its records and tensors for the judge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from samestep import reference
from samestep.engine import Layout
from samestep.errors import NotFinite, UserError
from samestep.job import ByLength, Job
from samestep.rank.hardware import is_out_of_memory
from samestep.records.plan import LayoutPlan, Prove, ReferencePlan
from samestep.records.record import (
    EvaluationSeen,
    PartSeen,
    Played,
    PlayedLayout,
    Progress,
    SeparationSeen,
    attempt,
    write_progress,
    write_state,
)
from samestep.tasks.inspect.load import build
from samestep.tasks.proof_job import SGD_LR, proof_job, steps_of
from samestep.training import digest_state
from samestep.world import World

RATES = 12  # learning rates tried for 'sgd', each a quarter of the previous one
ORDERED = 1e-6  # relative change of the first loss above which it depends on the order of the rows
EXPLODES = 10  # a loss above this multiple of the first step's largest


def play_reference(plan: ReferencePlan, world: World) -> list[PlayedLayout]:
    """Plays every training of every layout: once as it is, and twice with noise in the rounding."""
    player = ReferencePlayer(build(plan.job, plan.settings), plan, world)
    return [player.layout(number, layout) for number, layout in enumerate(plan.layouts)]


class ReferencePlayer:
    """Plays one job's reference. All layouts use the dtype and the learning rate found with the first."""

    def __init__(self, job: Job, plan: ReferencePlan, world: World) -> None:
        self.job, self.plan, self.world = job, plan, world
        self.folder = Path(plan.out)
        self.dtype = "float64"
        self.float64_failed: str | None = None
        self.sgd_lr: float | None = None
        self.reverses = True  # whether the noise may include reversing the rows
        self.shakes_data = True
        self.neutral: reference.Neutral | None = None

    def layout(self, number: int, planned: LayoutPlan) -> PlayedLayout:
        """Plays all trainings of one layout; in float32 if the model fails in float64. The record has the reason."""
        dtype = planned.dtype if self.dtype == "float64" else self.dtype
        self.neutral = reference.Neutral() if planned.neutral else None
        try:
            trainings = self._trainings(number, planned, dtype)
        except UserError:
            raise
        except Exception as error:
            if "Tried to step" in str(error):  # OneCycleLR's message
                raise UserError(
                    f"the job's scheduler ends before the proof's {self.plan.steps} steps; give fewer with "
                    "--steps, or a longer schedule"
                ) from error
            if dtype == "float32":
                raise
            text = str(error).strip()
            self.dtype = dtype = "float32"
            self.float64_failed = f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
            trainings = self._trainings(number, planned, dtype)
        return PlayedLayout(
            layout=_layout(planned),
            dtype=dtype,
            float64_failed=self.float64_failed or (None if dtype == "float64" else "the engine takes no float64"),
            rounds_to=planned.rounds_to,
            exact_steps=planned.exact_steps,
            clip_norm=self.job.clip_norm,
            sgd_lr=self.sgd_lr or SGD_LR,
            sgd_lr_usual=SGD_LR,
            trainings=trainings,
            separation=self._separation(dtype) if planned.neutral and planned.replicas == 1 else None,
            draws=bool(self.neutral and self.neutral.draws),
            batch_statistics=bool(self.neutral and self.neutral.batch_statistics),
        )

    def _separation(self, dtype: str) -> SeparationSeen:
        """Computes a few rows alone and together."""
        training = Prove("sgd", self.plan.steps, dtype, self.plan.replicas, SGD_LR, rows=self.plan.rows)
        return SeparationSeen(**vars(reference.separate(proof_job(self.job, training), self.world.device)))

    def _trainings(self, number: int, planned: LayoutPlan, dtype: str) -> dict[str, list[Played]]:
        """Plays the layout's trainings and writes their tensors. Returns name -> [as it is, and twice with noise]."""
        played: dict[str, list[Played]] = {}
        for name in planned.trainings:
            what = " without random numbers and batch statistics" if planned.neutral else ""
            phase = f"reference {name}, {planned.replicas} replicas{what}"
            write_progress(self.world.rank, self.folder, Progress(phase=phase, attempt=attempt()))
            rate = self.sgd_lr or SGD_LR
            training = Prove(name, self.plan.steps, dtype, self.plan.replicas, rate, rows=self.plan.rows)
            if name == "sgd" and self.sgd_lr is None:
                training, base = self._at_stable_rate(training, planned)
                self.sgd_lr = training.sgd_lr
            else:
                base = self._play(training, planned)
            small = proof_job(self.job, training)
            if name == "gradient":
                _check_samples_repeat(small, self.world.device)
                _check_repeats(base, self._play(training, planned), self.world.device)
            results = [base, *self._with_noise(training, planned, base)]
            for variant, result in enumerate(results):
                self._write(f"{number}.{name}.{variant}", result, whole=variant == 0)
            model = small.model()
            played[name] = [_record(result, small, model) for result in results]
        return played

    def _with_noise(
        self, training: Prove, planned: LayoutPlan, base: reference.TrainingResult
    ) -> list[reference.TrainingResult]:
        """Plays a training twice with noise in the rounding, and with reversed rows if their order does not matter."""
        dtype = getattr(torch, planned.rounds_to or training.dtype)
        reverses = self.reverses and not base.draws
        seeds = range(1, 2 if planned.neutral else 1 + self.plan.shaken)

        def shaken(seed: int) -> reference.TrainingResult:
            noise = reference.Noise(dtype, seed, reverses, planned.rounds_weights, self.shakes_data)
            return self._play(training, planned, noise)

        try:
            noisy = [shaken(seed) for seed in seeds]
        except (RuntimeError, ValueError, IndexError, UserError):
            if not self.shakes_data:
                raise
            self.shakes_data = False  # the criterion refuses rows that are moved by rounding
            noisy = [shaken(seed) for seed in seeds]
        first = base.micro_batches[0][0].loss
        visible = max(ORDERED, 100 * torch.finfo(dtype).eps) * abs(first)
        if reverses and any(abs(other.micro_batches[0][0].loss - first) > visible for other in noisy):
            self.reverses = False
            return self._with_noise(training, planned, base)
        return noisy

    def _play(
        self, training: Prove, planned: LayoutPlan, noise: reference.Noise | None = None
    ) -> reference.TrainingResult:
        small = proof_job(self.job, training)
        return reference.play(
            small,
            _layout(planned),
            steps_of(training, small),
            noise=noise,
            neutral=self.neutral,
            device=self.world.device,
        )

    def _at_stable_rate(self, training: Prove, planned: LayoutPlan) -> tuple[Prove, reference.TrainingResult]:
        """Plays a training at the largest learning rate tried at which its losses do not explode.

        Exploding losses would amplify rounding. Returns the training with that rate, and its result. An error counts
        as an explosion: a criterion may refuse what an exploding model returns.
        """
        for number in range(RATES):
            try:
                result = self._play(training, planned)
            except (NotFinite, RuntimeError, ValueError) as error:
                if number == RATES - 1 or is_out_of_memory(error):
                    raise
            else:
                if number == RATES - 1 or not _explodes(result, max(1, len(self.job.phases))):
                    break
            training = replace(training, sgd_lr=training.sgd_lr / 4)
        return training, result

    def _write(self, key: str, result: reference.TrainingResult, whole: bool) -> None:
        """Writes a training's final state to files. whole: also its first weights, gradients and buffers."""
        tensors = {"": result.state}
        if whole:
            tensors |= {
                ".start": result.start,
                ".rank0_gradient": result.rank0_gradient,
                ".before_last": result.before_last,
                ".rank0_before_last": result.rank0_before_last,
            }
            tensors |= {f".buffers{replica}": buffers for replica, buffers in enumerate(result.buffers)}
        for suffix, state in tensors.items():
            write_state(self.folder, self.world.rank, f"{key}{suffix}", state)


def _layout(planned: LayoutPlan) -> Layout:
    return Layout(planned.replicas, planned.split, planned.buffers)


def _record(result: reference.TrainingResult, job: Job, model: nn.Module) -> Played:
    """Returns the record of one training of the proof's `job`. model: untrained, for the digest of its weights."""
    return Played(
        seen=[[_part_seen(micro_batch) for micro_batch in replica] for replica in result.micro_batches],
        later=result.later,
        rates=result.rates,
        norms=result.norms,
        draws=result.draws,
        start_digest=digest_state(model),
        parameters=[name for name, _ in model.named_parameters(remove_duplicate=False)],
        length=len(job.train),
        clip_norm=job.clip_norm,
        each_once=job.order is None or isinstance(job.order, ByLength),
        phases=max(1, len(job.phases)),
        evaluation=_evaluation_seen(result.evaluation) if result.evaluation else None,
    )


def _part_seen(batch: reference.MicroBatch) -> PartSeen:
    return PartSeen(batch.epoch, batch.step, batch.micro, batch.indices, batch.weight, batch.digests, batch.loss)


def _evaluation_seen(result: reference.Evaluation) -> EvaluationSeen:
    return EvaluationSeen(result.rows, result.weight, result.sums, result.whole, unsteady=result.unsteady)


def _explodes(result: reference.TrainingResult, phases: int) -> bool:
    """phases: how many first steps show how large losses are at the beginning."""
    losses = [(part.step, abs(part.loss)) for replica in result.micro_batches for part in replica]
    return max(loss for _, loss in losses) > EXPLODES * max(loss for step, loss in losses if step < phases)


def _check_samples_repeat(job: Job, device: str) -> None:
    """Raises UserError when a sample has other values when it is read again."""
    rows = list(range(min(2, len(job.train))))
    first, second = (reference.digests(reference.fetch(job, rows, 0, device), len(rows)) for _ in range(2))
    if first != second:
        raise UserError(
            "the dataset gives other values when the same sample is read again, so no two trainings of this job could "
            "be compared; draw from Python's, numpy's or torch's global generator, which samestep keys by the sample, "
            "or in Job.augment from the generator that it is given"
        )


def _check_repeats(result: reference.TrainingResult, again: reference.TrainingResult, device: str) -> None:
    """Raises UserError when the same training gives other losses the second time; then nothing can be proven."""
    for first, second in zip(result.micro_batches[0], again.micro_batches[0]):
        close = first.loss == second.loss or (
            device != "cpu" and abs(first.loss - second.loss) <= 1e-6 * abs(first.loss)
        )
        if not close:
            raise UserError(
                "the job does not repeat itself: the same rows, weights and random seed gave a loss of "
                f"{first.loss!r} and then of {second.loss!r}; draw random numbers from torch alone (not from "
                "numpy or random), and keep no counters outside of the model"
            )
