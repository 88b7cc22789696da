"""Plays the reference for every layout of a plan, and writes its records and tensors for the judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan, log
from pathlib import Path

import torch
from torch import Tensor

from samestep import reference
from samestep.bounds import HARDLY_MOVES, LOSS_BY_ORDER, LOSS_COMPUTED_AGAIN_APART, MOVES
from samestep.data.stream import is_stream
from samestep.engine import Layout
from samestep.errors import NotFinite, UserError
from samestep.job import Job
from samestep.job.module_outputs import ModuleOutputs
from samestep.message import message
from samestep.rank.digests import state_digests
from samestep.rank.hardware import is_out_of_memory
from samestep.records.plan import (
    INTERRUPTED,
    OUTPUTS,
    OWN_DTYPE,
    SGD_LR,
    ContinuedLayout,
    LayoutPlan,
    ProveTask,
    ReferencePlan,
    Subset,
    interruption,
)
from samestep.records.record import Record
from samestep.records.reference_record import (
    ReferenceLayoutRecord,
    ReferenceLifeRecord,
    ReferenceTrainingRecord,
    SeparationRecord,
)
from samestep.records.tensor_files import write_state
from samestep.tasks.asked_ranks import asked_ranks
from samestep.tasks.inspect.load import build
from samestep.tasks.proof_job import extreme_rows, life_steps, proof_job, steps_of
from samestep.tasks.reference_records import ModelFacts, training_record
from samestep.tasks.reference_steps import StepsPlayed, noise_runs
from samestep.tasks.reference_tensors import (
    State,
    Written,
    from_plain,
    moved_from,
    write_start,
    write_training,
)
from samestep.world import World

RATES = 24  # tried, each a quarter of the previous one: a loss may be a sum over millions
EXPLODES = 10  # a loss above this multiple of the first step's largest


@dataclass(frozen=True)
class Trainings:
    """A layout's trainings. played: name -> [as it is, and with noise]. not_played: name -> why it could not be."""

    played: dict[str, list[ReferenceTrainingRecord]]
    not_played: dict[str, str]


def line_of(error: Exception) -> str:
    """Returns an error as one line."""
    return f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])}"


def play_reference(plan: ReferencePlan, world: World) -> list[ReferenceLayoutRecord]:
    """Plays every training of every layout: once as it is, and twice with noise in the rounding."""
    with asked_ranks() as places:
        layouts = ReferencePlayer(build(plan.job, plan.settings, compiled=False), plan, world).layouts()
    return [replace(layout, asks_rank=tuple(places)) for layout in layouts]


class ReferencePlayer:
    """Plays one job's reference. All layouts use one dtype and one learning rate: those that all of them take."""

    def __init__(self, job: Job, plan: ReferencePlan, world: World) -> None:
        self.job, self.plan, self.world = job, plan, world
        self.folder = Path(plan.out)
        self.dtype = "float64"
        self.float64_failed: str | None = None
        self.sgd_lr: float | None = None
        self.rates_left = RATES - 1
        self.reverses = True  # whether the noise may include reversing the rows
        self.shakes_data = True
        self.scales: bool | None = None  # whether the noise may include scaling the losses; None: not tried yet
        self.held_randomness: reference.HeldRandomness | None = None
        self.row_dimensions: reference.RowDimensions | None = None
        self.moved: list[str] | None = None  # the parameters that the forward pass moves
        self.written: list[str] = []  # those that it sets to values of its rows
        self.progress = StepsPlayed(plan, world.rank)
        self.facts: dict[str, ModelFacts] = {}  # dtype -> of the model in it
        buffers = dict(job.model().named_buffers())
        self.has_buffers = bool(buffers)
        self.counts = tuple(name for name, buffer in buffers.items() if not buffer.is_floating_point())
        self.played: dict[LayoutPlan, ReferenceLayoutRecord] = {}
        self.compared: dict[int, State] = {}  # layout -> its state after 'sgd', where that is not written

    def layouts(self) -> list[ReferenceLayoutRecord]:
        """Plays all layouts, at a rate at which no loss explodes."""
        while True:
            try:
                return self.from_one([self.layout(number, planned) for number, planned in enumerate(self.plan.layouts)])
            except TooFast:
                self.slow_down()

    def layout(self, number: int, planned: LayoutPlan) -> ReferenceLayoutRecord:
        """Plays all trainings of one layout, unless they are those of one that was played before."""
        alike = replace(planned, exact_steps=0, buffers=planned.buffers if self.has_buffers else "rank0")
        if alike in self.played:
            self.progress.skip([planned])
        else:
            self.played[alike] = self._played(number, planned)
        return replace(self.played[alike], layout=layout_of(planned), exact_steps=planned.exact_steps)

    def _played(self, number: int, planned: LayoutPlan) -> ReferenceLayoutRecord:
        """Plays a layout; in float32 if the model fails in float64. The record has the reason."""
        if planned.dtype == OWN_DTYPE:
            return self._played_in_own_dtype(number, planned)
        dtype = planned.dtype if self.dtype == "float64" else self.dtype
        if planned.subset:
            return self._played_at_second_size(number, planned, dtype)
        self.held_randomness = self._held_randomness(planned) if planned.held_randomness else None
        try:
            trainings = self._trainings(number, planned, dtype)
        except (UserError, TooFast):
            raise
        except Exception as error:
            if "Tried to step" in str(error):  # OneCycleLR's message
                raise UserError(message("scheduler_ends_before_the_proof", steps=self.plan.steps)) from error
            if dtype == "float32":
                raise
            self.dtype = dtype = "float32"
            self.float64_failed = line_of(error)
            trainings = self._trainings(number, planned, dtype)
        return self._record(number, planned, dtype, trainings)

    def _held_randomness(self, planned: LayoutPlan) -> reference.HeldRandomness:
        small = proof_job(self.job, self._task("sgd", planned.dtype))
        if planned.constant:
            held_randomness = reference.HeldRandomness(by_row=False)
        else:
            if self.row_dimensions is None:
                self.row_dimensions = reference.row_dimensions(small, self.world.device)
            held_randomness = reference.HeldRandomness(row_dimensions=self.row_dimensions)
        held_randomness.holds_collate = self._collate_draws
        return held_randomness

    @cached_property
    def _collate_draws(self) -> bool:
        """Whether the job's collate draws random numbers."""
        return reference.collate_draws(self.job, self.job.train)

    def _task(self, name: str, dtype: str, subset: Subset | None = None) -> ProveTask:
        """Returns a training of the proof, at the rate that is taken so far. subset: None: the plan's."""
        subset, rate = subset or Subset(self.plan.steps, self.plan.replicas, self.plan.rows), self.sgd_lr or SGD_LR
        return ProveTask(
            name, subset.steps, dtype, subset.replicas, rate, rows=subset.rows, extremes=self.plan.extremes
        )

    def _played_in_own_dtype(self, number: int, planned: LayoutPlan) -> ReferenceLayoutRecord:
        """Plays a layout with the job's tensors as they are. The record has the reason where they cannot train so."""
        self.held_randomness = None
        try:
            trainings = self._trainings(number, planned, OWN_DTYPE)
        except Exception as error:
            trainings = Trainings({}, {OWN_DTYPE: line_of(error)})
        return self._record(number, planned, self._own_dtype, trainings)

    def _played_at_second_size(self, number: int, planned: LayoutPlan, dtype: str) -> ReferenceLayoutRecord:
        """Plays a layout of a second number of ranks, at a learning rate of its own. The record has the reason where it
        cannot be played, because what is proven of the first number holds without it."""
        self.held_randomness = None
        rate, self.sgd_lr = self.sgd_lr, None
        try:
            trainings = self._trainings(number, planned, dtype)
        except Exception as error:
            trainings = Trainings({}, {name: line_of(error) for name in planned.trainings})
        record = self._record(number, planned, dtype, trainings)
        self.sgd_lr = rate
        return record

    @cached_property
    def _own_dtype(self) -> str:
        """The dtype of the model's parameters; the one with the fewest digits where there are several."""
        dtypes = {p.dtype for p in self.job.model().parameters() if p.is_floating_point()}
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        return str(coarsest).removeprefix("torch.")

    def _record(self, number: int, planned: LayoutPlan, dtype: str, trainings: Trainings) -> ReferenceLayoutRecord:
        return ReferenceLayoutRecord(
            layout=layout_of(planned),
            dtype=dtype,
            float64_failed=self.float64_failed or (None if dtype == "float64" else "the engine takes no float64"),
            rounds_to=planned.rounds_to,
            exact_steps=planned.exact_steps,
            rounds=planned.rounds,
            clip_norm=self.job.clip_norm,
            sgd_lr=self.sgd_lr or SGD_LR,
            sgd_lr_usual=SGD_LR,
            trainings=trainings.played,
            not_played=trainings.not_played,
            files=number,
            separation=self._separation(dtype, self.held_randomness)
            if self.held_randomness and planned.replicas == 1
            else None,
            draws=bool(self.held_randomness and self.held_randomness.draws),
            batch_statistics=bool(self.held_randomness and self.held_randomness.batch_statistics),
            keyed=bool(self.held_randomness and self.held_randomness.keyed),
            running_statistics=bool(self.held_randomness and self.held_randomness.running_statistics),
            counts=self.counts,
            scales=self.scales is not False,
            written=tuple(self.written),
            then=layout_of(planned.then) if planned.then else None,
        )

    def _separation(self, dtype: str, held_randomness: reference.HeldRandomness) -> SeparationRecord:
        """Computes a few rows alone and together."""
        training = self._task("sgd", dtype)
        rows = extreme_rows(self.job, training)
        return reference.separate(
            proof_job(self.job, training), self.world.device, held_randomness, self.moved or (), rows
        )

    def from_one(self, layouts: list[ReferenceLayoutRecord]) -> list[ReferenceLayoutRecord]:
        """Returns the layouts, those of several replicas with their parameters' distances from plain training's."""
        of_job = [layout for planned, layout in zip(self.plan.layouts, layouts, strict=True) if not planned.subset]
        single = next((layout for layout in of_job if layout.layout.replicas == 1 and "sgd" in layout.trainings), None)
        return [
            self._from(single, layout)
            if single and layout.layout.replicas > 1 and planned.dtype != OWN_DTYPE and not planned.subset
            else layout
            for planned, layout in zip(self.plan.layouts, layouts, strict=True)
        ]

    def _from(self, single: ReferenceLayoutRecord, replicated: ReferenceLayoutRecord) -> ReferenceLayoutRecord:
        final = self._final(replicated)
        return replace(replicated, from_one=from_plain(final, self._final(single), [*final]))

    def _final(self, layout: ReferenceLayoutRecord) -> State:
        """The state after 'sgd'."""
        if layout.files in self.compared:
            return self.compared[layout.files]
        arrays = Record(self.folder).arrays(f"{layout.files}.sgd", self.world.rank)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _trainings(self, number: int, planned: LayoutPlan, dtype: str) -> Trainings:
        """Plays the layout's trainings and writes their tensors."""
        trainings = Trainings({}, {})
        for name in planned.trainings:
            self.progress.begin(name, planned)
            training = self._task(name, dtype, self.plan.subset_of(planned))
            near = f"{number}.gradient" if "gradient" in trainings.played else ""
            try:
                trainings.played[name] = self._training(number, planned, training, near)
            except Exception as error:
                if name not in ("late", "life"):
                    raise
                trainings.not_played[name] = line_of(error)
        return trainings

    def _training(
        self, number: int, planned: LayoutPlan, training: ProveTask, near: str
    ) -> list[ReferenceTrainingRecord]:
        """Plays one training and writes its tensors. Returns it as it is, and with noise. near: of write_training."""
        name = training.training
        if self.moved is None:
            small, checked = proof_job(self.job, training), not planned.held_randomness
            repeated = repeatability(small, self.world.device, checked=checked)
            self.moved, self.written = repeated.moved, repeated.written
        if name == "sgd" and self.sgd_lr is None:
            training, base = self._at_stable_rate(training, planned)
            self.sgd_lr = training.sgd_lr
        else:
            outputs = ModuleOutputs() if self.plan.notes_outputs and name == "gradient" else None
            with self._slower_where_it_explodes(training):
                base = self._play(training, planned, outputs=outputs)
            if outputs:
                write_state(self.folder, self.world.rank, OUTPUTS.format(f"{number}.{name}"), outputs.values())
        small = proof_job(self.job, training)
        if name == "gradient" and training.dtype != OWN_DTYPE and not planned.subset:
            check_repeats(base, self._play(training, planned), self.world.device)
        facts, start = self._facts(small, training.dtype)
        moved = moved_from(start, {**base.buffers[0], **base.state})
        plain = replace(training_record(base, small, training, facts), moved=moved)
        if plain.life:
            plain = replace(plain, life=self._with_own_losses(plain.life, training, planned))
        if planned.compared:
            self.compared[number] = base.state
        else:
            write_training(self.folder, self.world.rank, key := f"{number}.{name}", base, near)
            if name in ("user", "life"):  # the job's optimizer may keep more than SGD does, and a run more weights
                base = replace(base, state=Written(self.folder, self.world.rank, key))
            if base.life:
                base.life.saved, base.life.raw = (
                    Written(self.folder, self.world.rank, key + kind) for kind in (".saved", ".raw")
                )
        del start
        furthest = max((plain.moved[name].distance for name in base.state if name in plain.moved), default=0.0)
        with self._slower_where_it_explodes(training):
            return [plain, *self._with_noise(training, planned, base, small, facts, furthest)]

    def _with_own_losses(
        self, life: ReferenceLifeRecord, training: ProveTask, planned: LayoutPlan
    ) -> ReferenceLifeRecord:
        """Adds the first losses of a run that begins with the model's own weights."""
        small = proof_job(self.job, training)
        own_run = reference.play(
            small, layout_of(planned), 1, device=self.world.device, evaluated=False, moved=self.moved or ()
        )
        losses = [[micro_batch.loss or 0.0 for micro_batch in replica] for replica in own_run.micro_batches]
        cut = life_steps(training, len(small.phases))
        return replace(life, own_losses=losses, checkpoint_every=cut.checkpoint_every)

    def _facts(self, job: Job, dtype: str) -> tuple[ModelFacts, State]:
        """Describes the untrained model, and returns its tensors. Writes samples of them once."""
        model = job.model()
        state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
        start = {**dict(model.named_buffers()), **state}
        if dtype not in self.facts:
            write_start(self.folder, self.world.rank, self._own_dtype if dtype == OWN_DTYPE else dtype, state)
            names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            self.facts[dtype] = ModelFacts(state_digests(model), names)
        return self.facts[dtype], start

    def _with_noise(
        self,
        training: ProveTask,
        planned: LayoutPlan,
        base: reference.TrainingResult,
        job: Job,
        facts: ModelFacts,
        furthest: float,
    ) -> list[ReferenceTrainingRecord]:
        """Plays a training again with noise in the rounding, with reversed rows if their order does not matter, and
        with scaled losses if the gradients follow them.

        furthest: how far the training moves any tensor.
        """
        own_or_given = self._own_dtype if training.dtype == OWN_DTYPE else training.dtype
        dtype = getattr(torch, planned.rounds_to or own_or_given)
        of_data = getattr(torch, own_or_given) if planned.rounds == "sums" else dtype
        reverses = self.reverses and not base.draws
        seeds = range(1, 1 + noise_runs(self.plan, planned))

        def with_noise(scales: bool) -> list[ReferenceTrainingRecord]:
            rounding = {"shakes_data": self.shakes_data, "scales": scales, "of_data": of_data}
            draws = [reference.Noise(dtype, seed, reverses, planned.rounds_weights, **rounding) for seed in seeds]
            played = (self._play(training, planned, noise, base.life) for noise in draws)
            return [training_record(result, job, training, facts, base) for result in played]

        def play_again() -> None:
            self.progress.again(len(seeds) * len(steps_of(training, job, reference.per_epoch(job))))

        def moves(noisy: list[ReferenceTrainingRecord]) -> bool:
            """Whether the noise moves the weights by more than rounding does."""
            return any(distance > LOSS_BY_ORDER * furthest for run in noisy for distance in run.distances.values())

        scales = self.scales is not False
        try:
            noisy = with_noise(scales)
        except (RuntimeError, ValueError, IndexError, UserError):
            if not self.shakes_data:
                raise
            self.shakes_data = False  # the criterion refuses rows that are moved by rounding
            noisy = with_noise(scales)
        first = base.micro_batches[0][0].loss or 0.0
        visible = max(LOSS_BY_ORDER, 100 * torch.finfo(dtype).eps) * abs(first)
        ordered = any(abs((run.micro_batches[0][0].loss or 0.0) - first) > visible for run in noisy)
        if dtype == torch.float64 and not ordered and moves(noisy):
            if self.scales is None:
                # A hook that clamps gradients, or a backward pass that normalises them, takes another step of a
                # larger loss: that is no rounding.
                play_again()
                unscaled = with_noise(False)
                self.scales = moves(unscaled)
                noisy = noisy if self.scales else unscaled
            ordered = moves(noisy)  # the weights too, as those of a model that keeps a queue of rows
        if reverses and ordered:
            self.reverses = False
            play_again()
            return self._with_noise(training, planned, base, job, facts, furthest)
        return noisy

    def _play(
        self,
        training: ProveTask,
        planned: LayoutPlan,
        noise: reference.Noise | None = None,
        like: reference.Life | None = None,
        outputs: ModuleOutputs | None = None,
    ) -> reference.TrainingResult:
        small = proof_job(self.job, training)
        steps = steps_of(training, small, reference.per_epoch(small))
        sgd = training.training == "sgd"
        explosion = end_at_explosion(max(1, len(self.job.phases))) if sgd and not noise else None

        life = None
        if training.training == "life":
            cut = life_steps(training, len(small.phases))
            life = reference.Life(small, cut.every, cut.stop, cut.steps, self.world.device, like)

        def after_step(step: int, losses: list[float]) -> None:
            self.progress.after_step(step, len(steps))
            if explosion:
                explosion(step, losses)

        return reference.play(
            small,
            layout_of(planned),
            steps,
            noise=noise,
            held_randomness=self.held_randomness,
            device=self.world.device,
            parts=training.training == "gradient" and not noise,
            evaluated=life is None and (not planned.compared or (self.has_buffers and not noise)),
            after_step=after_step,
            next_layout=layout_of(planned.then) if planned.then else None,
            next_layout_from=interruption_of_layout(small, training, planned, len(steps)),
            moved=self.moved or (),
            life=life,
            outputs=outputs,
        )

    def _at_stable_rate(self, training: ProveTask, planned: LayoutPlan) -> tuple[ProveTask, reference.TrainingResult]:
        """Plays a training at the largest learning rate tried at which its losses do not explode.

        Exploding losses would amplify rounding. A rate that hardly moves the weights, whose loss is tiny, is raised
        first. Returns the training with that rate, and its result.
        """
        raised = False
        while True:
            done = self.progress.done
            try:
                with self._slower_where_it_explodes(training):
                    result = self._play(training, planned)
            except TooFast:
                self.rates_left -= 1
                training = replace(training, sgd_lr=training.sgd_lr / 4)
            else:
                rate = rate_that_moves(training.sgd_lr, result.norms)
                if raised or training.sgd_lr < SGD_LR or rate == training.sgd_lr:
                    return training, result
                raised, training = True, replace(training, sgd_lr=rate)
            self.progress.again(self.progress.done - done)

    @contextmanager
    def _slower_where_it_explodes(self, training: ProveTask) -> Iterator[None]:
        """Raises TooFast where 'sgd' explodes in the block, as long as there is a lower rate to try. An error counts as
        an explosion: a criterion may refuse what an exploding model returns."""
        try:
            yield
        except (NotFinite, RuntimeError, ValueError) as error:
            if training.training != "sgd" or not self.rates_left or is_out_of_memory(error):
                raise
            raise TooFast from error

    def slow_down(self) -> None:
        """Goes back to the beginning, with a quarter of the learning rate."""
        assert self.sgd_lr
        self.rates_left -= 1
        self.sgd_lr /= 4
        self.played.clear()
        self.compared.clear()
        self.progress.again(self.progress.done)


def layout_of(planned: LayoutPlan | ContinuedLayout) -> Layout:
    return Layout(planned.replicas, planned.split, planned.buffers, micro_batches=planned.micro_batches)


def interruption_of_layout(small: Job, training: ProveTask, planned: LayoutPlan, steps: int) -> int | None:
    """Returns the step before which the training goes to other ranks; None where it does not."""
    if planned.then is None or training.training not in INTERRUPTED:
        return None
    only_at_end = small.carry_state and planned.then.replicas != planned.replicas
    return interruption(small.seed, training.training, steps, reference.per_epoch(small), only_at_end=only_at_end)


class Exploded(RuntimeError):
    """The losses of a training explode."""


class TooFast(Exception):
    """The losses explode, and there is a lower rate to try."""


def end_at_explosion(phases: int) -> Callable[[int, list[float]], None]:
    """Returns a function of each step and its losses that raises Exploded once one is far above the first steps', as
    many as there are phases."""
    largest: list[float] = []

    def after_step(step: int, losses: list[float]) -> None:
        largest.append(max(map(abs, losses)))
        if step >= phases and largest[-1] > EXPLODES * max(largest[:phases]):
            raise Exploded

    return after_step


def rate_that_moves(rate: float, norms: Sequence[float]) -> float:
    """Returns `rate`, or a higher one where the gradients of these norms hardly move the weights, as those of a tiny
    loss. norms: of the gradient, at each step."""
    moves = rate * max(norms)
    return rate * 4.0 ** round(log(MOVES / moves, 4)) if 0 < moves < HARDLY_MOVES else rate


def _check_samples_repeat(job: Job, device: str) -> None:
    """Raises UserError when a sample has other values when it is read again."""
    rows = list(range(min(2, len(job.train))))
    first, second = (reference.digests(reference.fetch(job, rows, 0, device), len(rows)) for _ in range(2))
    if first != second:
        raise UserError(
            message("stream_differs_when_read_again" if is_stream(job.train) else "sample_differs_when_read_again")
        )


def moved_parameters(job: Job, device: str, *, checked: bool) -> list[str]:
    """The parameters that a forward pass moves. checked: as of repeatability."""
    return repeatability(job, device, checked=checked).moved


def repeatability(job: Job, device: str, *, checked: bool) -> reference.Repeatability:
    """Returns what a forward pass changes besides its graph. checked: raises UserError for what gives other values each
    time."""
    if checked:
        _check_samples_repeat(job, device)
    repeated = reference.repeatability(job, device)
    if checked:
        for first, second in repeated.losses:
            _check_same(first, second, device)
    return repeated


def check_repeats(result: reference.TrainingResult, again: reference.TrainingResult, device: str) -> None:
    """Raises UserError when the same training gives other losses the second time; then nothing can be proven."""
    for first, second in zip(result.micro_batches[0], again.micro_batches[0]):
        _check_same(first.loss or 0.0, second.loss or 0.0, device)


def _check_same(first: float, second: float, device: str) -> None:
    if (
        first == second
        or isnan(first)
        or (device != "cpu" and abs(first - second) <= LOSS_COMPUTED_AGAIN_APART * abs(first))
    ):
        return
    raise UserError(message("loss_differs_when_computed_again", first=first, second=second))
