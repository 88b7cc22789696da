"""The reference's training: one process takes the step that N ranks must take, one replica after the other."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from samestep.engine import Layout
from samestep.errors import NotFinite, UserError, not_a_scalar
from samestep.job import Batch, Job
from samestep.job.module_outputs import ModuleOutputs
from samestep.job.walk import without_graph
from samestep.records.training_record import EvaluationRecord, MicroBatchRecord
from samestep.reference.all_rows import AllRows, over_all_rows, synced_outputs
from samestep.reference.evaluation import after_evaluation, evaluate
from samestep.reference.fetch import (
    StepRows,
    digests,
    fetch,
    place,
    random_state,
    row_keys,
    seed,
    weight_of_batch,
)
from samestep.reference.first_gradient import FirstGradient, present, sample
from samestep.reference.held_randomness import HeldRandomness
from samestep.reference.life import Life
from samestep.reference.noise import Noise
from samestep.reference.optimizers import Closure, PlayedPhase, phases_of, scheduled
from samestep.reference.replica_state import Carried, ReplicaState, follow_first, output_of
from samestep.reference.schedule import per_epoch, step_rows, weight

State = Mapping[str, Tensor]  # name -> tensor
LATER = (2, 3, 97)  # epochs whose rows are recorded without training on them


@dataclass(frozen=True)
class TrainingResult:
    """A whole training. Of `own`, `before_last` and `own_before_last` see first_gradient.py."""

    micro_batches: list[list[MicroBatchRecord]]
    """What each replica saw: [replica][micro-batch in order]."""

    later: Mapping[int, list[list[list[int]]]]
    """Epoch -> [micro-batch][replica] -> the rows of the epoch's first step."""

    rates: list[list[float]]
    """The learning rates: [step][parameter group]."""

    norms: list[float]
    """The norm of each step's gradient, before clipping."""

    draws: bool
    """Whether the model draws random numbers."""

    state: State
    """The model's state dict after the last step."""

    buffers: list[State]
    """The buffers of each replica after the last step."""

    own: State
    """Samples of replica 0's own gradient of the first step. Empty: the parts of this gradient are not sampled."""

    before_last: State
    """Samples of the first step's mean gradient over the replicas, without its last micro-batch. Empty: there is but
    one micro-batch, or no part is sampled."""

    own_before_last: State
    """Samples of replica 0's own gradient of the first step, without its last micro-batch. Empty as `before_last`."""

    evaluation: EvaluationRecord | None
    """The evaluation of the last weights. None: they are not evaluated."""

    life: Life | None = None
    """What the run did besides its steps. None: nothing."""


def play(
    job: Job,
    layout: Layout,
    steps: int | Sequence[int],
    *,
    noise: Noise | None = None,
    held_randomness: HeldRandomness | None = None,
    device: str = "cpu",
    parts: bool = False,
    evaluated: bool = True,
    after_step: Callable[[int, list[float]], None] | None = None,
    next_layout: Layout | None = None,
    next_layout_from: int | None = None,
    moved: Collection[str] = (),
    life: Life | None = None,
    outputs: ModuleOutputs | None = None,
) -> TrainingResult:
    """Trains `job` on `layout.replicas` replicas: see docs/proof.md, "What is compared".

    steps: how many optimizer steps; or those that are trained in turn, by their number in the whole schedule.
    noise: adds to the rounding, for a second training that differs from the first by rounding alone.
    held_randomness: computes without random numbers and batch statistics. parts: whether the parts of the first
    gradient are sampled. evaluated: whether the last weights are. after_step: called with each step and its losses.
    next_layout: the layout of the steps from `next_layout_from` on, as where other ranks continue. moved: the
    parameters that the forward pass moves. life: what a run does besides; it evaluates by itself. outputs: takes what
    modules return.
    """
    training = ReplicatedTraining(
        job, layout, noise, device=device, held_randomness=held_randomness, moved=moved, life=life
    )
    if outputs:
        outputs.begin(training.model)
    if parts:
        training.first = FirstGradient(layout.replicas, {})
    for step, losses in training.steps(
        range(steps) if isinstance(steps, int) else steps, next_layout, next_layout_from
    ):
        if after_step:
            after_step(step, losses)
    result = training.result(evaluated)
    model = weakref.ref(training.model)
    del training
    if model():
        gc.collect()  # the model is in a circle: it would stay in memory beside the next
    return result


@dataclass
class Forward:
    """What the replicas' forward passes of one micro-batch share."""

    phase: PlayedPhase
    """The phase that takes the step."""

    epoch: int
    """The number of the epoch, from 0."""

    step: int
    """The number of the step in this training, from 0."""

    micro: int
    """The number of the micro-batch in its step, from 0."""

    rows: list[list[int]]
    """The indices of each replica's rows: [replica][row]."""

    weights: list[float] = field(default_factory=list)
    """The weight of each replica's rows."""

    total: float = 0.0
    """The weight of all rows of the step."""

    together: StepRows | None = None
    """All rows of the step, where collate draws random numbers and each row keeps what it drew. None elsewhere."""

    outputs: list[Any] = field(default_factory=list)
    """Each replica's output, where one forward pass serves all of them (SyncBatchNorm). Empty elsewhere."""

    all_rows: AllRows | None = None
    """The loss, where the criterion sees all replicas' rows at once. None elsewhere."""


class ReplicatedTraining:
    """One model, an optimizer for each phase, the sum of the replicas' gradients, and of each replica its state."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        noise: Noise | None,
        device: str,
        held_randomness: HeldRandomness | None,
        moved: Collection[str],
        life: Life | None = None,
    ) -> None:
        self.held_randomness, self.moved = held_randomness or nullcontext(), frozenset(moved)
        self.job, self.layout, self.noise, self.device = job, layout, noise, device
        self.replicas = range(layout.replicas)
        self.model, self.life = job.model().to(device), life
        if life:
            life.begin(self.model)
        if noise:
            noise.perturb(self.model.parameters(), data=True)
        self.phases = phases_of(job, self.model)
        self.scheduled = scheduled(self.phases)
        self.scheduler = job.scheduler.make(self.scheduled) if job.scheduler else None
        self.states = [ReplicaState(self.model, self.moved) for _ in self.replicas]
        self.attributes_at_start = self.states[0].attributes
        self.carried = Carried(job)
        self.epoch = -1
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.first: FirstGradient | None = None
        self.own_gradients: dict[int, list[Tensor | None]] | None = None  # each replica's, where they are asked for
        self.loss_scale = 1.0  # by which each loss is multiplied, and each gradient divided
        self.most_replicas = layout.replicas
        self.micro_batches: dict[int, list[MicroBatchRecord]] = defaultdict(list)
        self.rates: list[list[float]] = []
        self.norms: list[float] = []
        self.draws = False
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad and job.ema]
        self.average = {name: p.detach().clone() for name, p in trained}
        self.decay = job.ema or 0.0

    def continue_with(self, layout: Layout) -> None:
        """Changes the layout, as where a training is continued from a checkpoint on other ranks. Replicas keep their
        own state where there are as many; others begin with replica 0's."""
        if layout.replicas != self.layout.replicas:
            self.carried.forget()
            self.states[0].restore(self.model)
            self.states = [ReplicaState(self.model, self.moved) for _ in range(layout.replicas)]
        self.layout, self.replicas = layout, range(layout.replicas)

    def restart(self) -> None:
        """Forgets what no checkpoint has: what the model keeps in attributes, such as a hidden state or a cache."""
        for state in self.states:
            state.attributes = self.attributes_at_start

    def steps(
        self, scheduled_steps: Iterable[int], next_layout: Layout | None = None, next_layout_from: int | None = None
    ) -> Iterator[tuple[int, list[float]]]:
        """Trains step after step, by their numbers in the whole schedule. Yields each step's number in this training
        and its losses. next_layout: the layout of the steps from `next_layout_from` on."""
        self.most_replicas = max(self.layout.replicas, next_layout.replicas if next_layout else 0)
        for step, scheduled_step in enumerate(scheduled_steps):
            if next_layout and step == next_layout_from:
                self.continue_with(next_layout)
            if self.life and step == self.life.stop:
                self.restart()
            yield step, self.step(step, scheduled_step)
            if self.life:
                self.life.after(step + 1, self.state)

    def step(self, step: int, scheduled_step: int) -> list[float]:
        """One step: every micro-batch of every replica forward and backward, then the phase's optimizer once. Returns
        the losses. step: counted in this training. scheduled_step: in the whole schedule."""
        phase = self.phases[scheduled_step % len(self.phases)]
        epoch = scheduled_step // per_epoch(self.job)
        if epoch != self.epoch:
            self.epoch = epoch
            self.carried.forget()
        micro_batches, norm = self._evaluated(step, scheduled_step, phase)
        for replica, micro_batch in micro_batches:
            self.micro_batches[replica].append(micro_batch)
        self.norms.append(norm)
        mean = _mean_loss(micro_batches)
        closure = Closure(self.parameters, mean, lambda: _mean_loss(self._evaluated(step, scheduled_step, phase)[0]))
        self._optimizer_step(phase, closure, step, ends_epoch=(scheduled_step + 1) % per_epoch(self.job) == 0)
        return [micro_batch.loss or 0.0 for _, micro_batch in micro_batches]

    def _evaluated(
        self, step: int, scheduled_step: int, phase: PlayedPhase
    ) -> tuple[list[tuple[int, MicroBatchRecord]], float]:
        """Leaves the step's gradient at the weights as they are: the mean over the replicas, clipped. Returns what
        each replica saw, and the gradient's norm before clipping."""
        plan = step_rows(self.job, self.layout, scheduled_step)
        if self.noise and self.noise.reverses:
            plan = [[rows[::-1] for rows in of_replica] for of_replica in plan]
        if self.layout.buffers == "rank0":
            for state in self.states[1:]:
                state.buffers = _copy(self.states[0].buffers)
        forwards = self._forwards(phase, step, scheduled_step, plan)
        micro_batches = list(self._summed(forwards))
        follow_first(self.states, plan)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        for gradient in gradients:
            gradient.div_(self.layout.replicas)
            if self._scale != 1.0:
                gradient.div_(self._scale)
        if self.noise:
            self.noise.perturb(gradients)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.job.clip_norm or float("inf"))
        return micro_batches, float(norm)

    def _forwards(
        self, phase: PlayedPhase, step: int, scheduled_step: int, plan: list[list[list[int]]]
    ) -> list[Forward]:
        """A step's micro-batches, with what all of its rows weigh. plan: [micro-batch][replica] -> rows."""
        together = None
        if isinstance(self.held_randomness, HeldRandomness) and self.held_randomness.holds_collate:
            rows = [row for (of_one,) in step_rows(self.job, Layout(1), scheduled_step) for row in of_one]
            together = StepRows(self.job, rows, self.epoch, self.device)
        forwards = [Forward(phase, self.epoch, step, micro, rows, together=together) for micro, rows in enumerate(plan)]
        for forward in forwards:
            forward.weights = [self._weight(forward, rows) for rows in forward.rows]
        total = sum(weighs for forward in forwards for weighs in forward.weights)
        for forward in forwards:
            forward.total = total
        return forwards

    def _summed(self, forwards: list[Forward]) -> Iterator[tuple[int, MicroBatchRecord]]:
        """Sums all gradients of a step, as N ranks do: each replica's over its micro-batches, then these over the
        replicas; with noise, the replicas in reverse. Yields each replica's micro-batches.

        Where the replicas share forward passes, all replicas' parts of a micro-batch are added, then the next's.
        """
        self._clear_gradients()
        replicas = self.replicas[::-1] if self.noise else self.replicas
        if self.layout.replicas > 1 and (self.job.gather_outputs or self.job.sync_batchnorm):
            for forward in forwards:
                if self.job.gather_outputs:
                    forward.all_rows = self._over_all_rows(forward)
                for replica in replicas:
                    yield replica, self._micro_batch(forward, replica)
            return
        sums: list[Tensor | None] = [None] * len(self.parameters)  # the sum of the replicas before
        separately = len(forwards) > 1 or self.own_gradients is not None
        for replica in replicas:
            for forward in forwards:
                yield replica, self._micro_batch(forward, replica)
            if self.own_gradients is not None:
                gradients = [None if p.grad is None else p.grad / self._scale for p in self.parameters]
                self.own_gradients[replica] = gradients
            if separately:
                sums = [_sum(sum_, p.grad) for sum_, p in zip(sums, self.parameters)]
                self._clear_gradients()
        if separately:
            for parameter, sum_ in zip(self.parameters, sums):
                parameter.grad = sum_

    @property
    def _scale(self) -> float:
        return self.loss_scale * (self.noise.scale if self.noise else 1.0)

    def _seed(self, step: int, micro: int, replica: int) -> None:
        """Seeds what dropout draws from, for a replica's micro-batch."""
        seed(self.device, self.job.seed, "replica", step, micro, replica)

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _micro_batch(self, forward: Forward, replica: int) -> MicroBatchRecord:
        """Adds the gradient of one replica's part of a micro-batch; nothing happens where it has no rows."""
        rows = forward.rows[replica]
        data, weighs = self._data(forward, rows), forward.weights[replica]
        loss = self._forward_and_backward(forward, replica, data, weighs) if rows else 0.0
        digested = [] if self.noise else digests(data, len(rows))
        return MicroBatchRecord(
            forward.epoch, forward.step, forward.micro, indices=rows, weight=weighs, digests=digested, loss=loss
        )

    def _data(self, forward: Forward, rows: list[int]) -> Any:
        """The collated rows; None where there are none."""
        if forward.together is None:
            return fetch(self.job, rows, forward.epoch, self.device)
        data = forward.together.of(rows)
        if forward.together.misfit and rows and isinstance(self.held_randomness, HeldRandomness):
            self.held_randomness.unknown.add("collate")
        return data

    def _weight(self, forward: Forward, rows: list[int]) -> float:
        """What rows weigh in the step's mean."""
        if self.job.batch_weight is None:
            return weight(self.job, rows)
        return weight_of_batch(self.job, rows, self._data(forward, rows), forward.epoch, forward.step)

    def _seed_rows(self, forward: Forward, replica: int | None, rows: list[int]) -> None:
        """Seeds a replica's random numbers of a micro-batch, or, where each row keeps its own, those of the step.
        replica: None: the criterion on all rows."""
        if isinstance(self.held_randomness, HeldRandomness):
            self.held_randomness.rows = row_keys(rows)
            seed("cpu", self.job.seed, "rows", forward.step)
        elif replica is not None:
            self._seed(forward.step, forward.micro, replica)

    def _forward_and_backward(self, forward: Forward, replica: int, data: Any, weighs: float) -> float:
        """Adds a replica's gradient, from its own state and random numbers. Returns the rows' mean loss."""
        job, step, micro = forward.phase.job, forward.step, forward.micro
        if not forward.outputs:
            self.states[replica].restore(self.model)
        self._seed_rows(forward, replica, forward.rows[replica])
        all_rows = forward.all_rows
        batch = all_rows.batches[replica] if all_rows else self._batch(forward, replica, data)
        before = random_state(self.device)
        if job.sync_batchnorm and self.layout.replicas > 1 and not forward.outputs:
            with self.held_randomness:
                forward.outputs = synced_outputs(
                    job,
                    self.model,
                    forward.rows,
                    step=step,
                    micro=micro,
                    epoch=forward.epoch,
                    noise=self.noise,
                    phase=forward.phase.number,
                )
        # The mean over the replicas is then that over the rows.
        share = weighs * self.layout.replicas / (forward.total or 1.0)
        if forward.all_rows:
            share = float(self.layout.replicas)  # the mean over the replicas is then their sum
        with self.held_randomness:
            if forward.outputs:
                output = forward.outputs[replica]
            else:
                output = self.carried.keep(job.forward(self.model, batch), replica, micro)
            loss = all_rows.stand_in(replica, output) if all_rows else job.criterion(output, batch)
            if loss.dim() != 0:
                raise not_a_scalar(list(loss.shape))
            self.draws = self.draws or not torch.equal(before, random_state(self.device))
            sampled = sample(self.parameters) if self.first and step < len(self.phases) else None
            (loss * (share * self._scale)).backward(retain_graph=bool(forward.outputs))
        for parameter, gradient in zip(self.parameters, forward.phase.owned([p.grad for p in self.parameters])):
            parameter.grad = gradient
        if self.first and sampled:
            self.first.add(replica, micro, sampled, sample(self.parameters))
        mean_loss = all_rows.loss if all_rows else float(loss.detach())
        if not (
            isfinite(mean_loss)
            or (isinstance(self.held_randomness, HeldRandomness) and self.held_randomness.explains_non_finite(step))
        ):
            raise NotFinite(
                f"the loss is not finite at step {step} of the proof: {mean_loss}; "
                "look at the data and the criterion, or lower the learning rate"
            )
        self.states[replica] = ReplicaState(self.model, self.moved)
        return mean_loss

    def _batch(self, forward: Forward, replica: int, data: Any) -> Batch:
        rows = forward.rows[replica]
        weighs, phase = forward.weights[replica], forward.phase.number
        micro_batch = place(forward.step, forward.micro, rows, forward.epoch, weighs, phase)
        state = self.carried.of(replica, forward.micro)
        return Batch(self.noise.perturbed(data) if self.noise else data, micro_batch, state=state)

    def _over_all_rows(self, forward: Forward) -> AllRows:
        """The loss over all replicas' rows. Outputs are computed without a graph, and in each replica's turn again."""
        job = forward.phase.job
        if job.sync_batchnorm:
            raise UserError("the proof takes sync_batchnorm or gather_outputs, not both; verify it with one of them")
        batches, outputs = {}, {}
        for replica in (number for number in self.replicas if forward.rows[number]):
            data = self._data(forward, forward.rows[replica])
            batches[replica] = self._batch(forward, replica, data)
            self.states[replica].restore(self.model)
            self._seed_rows(forward, replica, forward.rows[replica])
            with self.held_randomness:
                outputs[replica] = without_graph(output_of, job, self.model, batches[replica])
        self._seed_rows(forward, None, [row for replica in batches for row in forward.rows[replica]])
        with self.held_randomness:
            all_rows = over_all_rows(job, outputs, batches, self.device)
        self.draws = self.draws or all_rows.draws
        return all_rows

    def _optimizer_step(self, phase: PlayedPhase, closure: Closure, step: int, *, ends_epoch: bool) -> None:
        """The phase's optimizer; the scheduler where it is due."""
        self._update(phase, closure)
        if self.job.ema:
            self._average_weights(phase)
        self._schedule(phase, step, ends_epoch=ends_epoch)

    def _update(self, phase: PlayedPhase, closure: Closure) -> None:
        """One step of the phase's optimizer, whose learning rates are noted before it."""
        self.rates.append([float(group["lr"]) for group in self.scheduled.param_groups if group["params"]])
        if phase.job.optimizer.needs_closure:
            phase.optimizer.step(closure)
        else:
            phase.optimizer.step()
        if self.noise and self.noise.rounds_weights:
            self.noise.perturb(self.parameters)

    def _average_weights(self, phase: PlayedPhase) -> None:
        """Moves the average of the phase's weights towards them."""
        moved = {id(p) for p, owned in zip(self.parameters, phase.owns) if owned}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in moved:
                old, new = self.decay * self.average[name], (1.0 - self.decay) * parameter.detach()
                self.average[name] = old + new

    def _schedule(self, phase: PlayedPhase, step: int, *, ends_epoch: bool) -> None:
        """Steps the scheduler where it is due."""
        every = self.job.scheduler.every if self.job.scheduler else None
        ends_round = phase is self.phases[-1]
        if ends_round and phase.optimizer is not self.scheduled:
            self.scheduled.step()  # a scheduler warns where it has not been called
        if self.scheduler and ((every == "step" and ends_round) or (every == "epoch" and ends_epoch)):
            self.scheduler.step()
        evaluates = self.life is None or self.life.evaluates(step + 1)
        if self.scheduler and self.job.scheduler and every == "evaluation" and evaluates:
            after_evaluation(self.job, self.scheduler, evaluate(self.job, self.state(), self.device, twice=False))

    def state(self) -> dict[str, Tensor]:
        """The weights as they are evaluated and saved: averaged where the job asks for it, with replica 0's buffers."""
        self.states[0].restore(self.model)
        state = {name: t.detach() for name, t in self.model.state_dict().items() if isinstance(t, Tensor)}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):  # tied weights have several
            if names[id(parameter)] in self.average:
                state[name] = self.average[names[id(parameter)]]
        return state

    def result(self, evaluated: bool) -> TrainingResult:
        """What was seen, and the weights with replica 0's buffers. The training has ended; its gradients and its
        optimizer's state are freed."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        later = () if self.noise else LATER
        state = self.state()
        if self.life:
            self.life.end(state, self.model, [replica.buffers for replica in self.states])
        self._clear_gradients()
        for optimizer in (self.scheduled, *(phase.optimizer for phase in self.phases)):
            optimizer.state.clear()
            optimizer.param_groups.clear()  # it is in a circle with its scheduler, and would keep the weights
        return TrainingResult(
            micro_batches=[self.micro_batches[replica] for replica in range(self.most_replicas)],
            later={epoch: self._later(epoch) for epoch in later},
            rates=self.rates,
            norms=self.norms,
            draws=self.draws,
            state=state,
            buffers=[state.buffers for state in self.states],
            own=present(names, self.first.own()) if self.first else {},
            before_last=present(names, self.first.before_last()) if self.first else {},
            own_before_last=present(names, self.first.own_before_last()) if self.first else {},
            evaluation=evaluate(self.job, state, self.device, twice=not self.noise) if evaluated else None,
            life=self.life,
        )

    def _later(self, epoch: int) -> list[list[list[int]]]:
        """[micro-batch][replica] -> the rows of an epoch's first step."""
        absent = self.most_replicas - self.layout.replicas
        return [[*micro, *([[]] * absent)] for micro in step_rows(self.job, self.layout, epoch * per_epoch(self.job))]


def _mean_loss(micro_batches: Iterable[tuple[int, MicroBatchRecord]]) -> float:
    """The mean loss over the rows of a step."""
    total = sum(micro_batch.weight for _, micro_batch in micro_batches)
    return sum((micro_batch.loss or 0.0) * micro_batch.weight for _, micro_batch in micro_batches) / (total or 1.0)


def _sum(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if total is None or gradient is None:
        return gradient if total is None else total
    return total.add_(gradient)


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in state.items() if isinstance(t, Tensor)}
