"""The reference's training: one process takes the step that N ranks must take, one replica after the other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from samestep.engine import Layout
from samestep.errors import NotFinite, UserError, not_a_scalar
from samestep.job import Batch, Job
from samestep.reference.all_rows import AllRows, over_all_rows
from samestep.reference.evaluation import after_evaluation, evaluate
from samestep.reference.fetch import digests, fetch, place, random_state
from samestep.reference.neutral import Neutral
from samestep.reference.noise import Noise
from samestep.reference.replica_state import ReplicaState
from samestep.reference.results import MicroBatch, TrainingResult
from samestep.reference.schedule import per_epoch, seeded, step_rows, weight
from samestep.reference.together import outputs_together
from samestep.reference.turns import Gradient, Turn, filled, scheduled, turns_of

LATER = (2, 3, 97)  # epochs whose rows are told without training on them


def play(
    job: Job,
    layout: Layout,
    steps: int,
    *,
    noise: Noise | None = None,
    neutral: Neutral | None = None,
    device: str = "cpu",
) -> TrainingResult:
    """Trains `job` for `steps` optimizer steps on `layout.replicas` replicas: see docs/proof.md, "What is compared".

    noise: shakes the rounding, for a second training that differs from the first by rounding alone. neutral: computes
    without random numbers and batch statistics.
    """
    training = ReplicatedTraining(job, layout, noise, device, neutral)
    for step in range(steps):
        training.step(step)
    return training.result()


@dataclass
class Forward:
    """What the replicas' forward passes of one micro-batch share. turn: the phase. rows: each replica's. total: what
    all rows of the step weigh. outputs: each replica's, where one forward pass serves all of them (SyncBatchNorm).
    all_rows: the loss, where the criterion sees all replicas' rows at once."""

    turn: Turn
    epoch: int
    step: int
    micro: int
    rows: list[list[int]]
    total: float
    outputs: list[Any] = field(default_factory=list)
    all_rows: AllRows | None = None


class ReplicatedTraining:
    """One model, an optimizer for each phase, and of each replica its gradient and its state."""

    def __init__(self, job: Job, layout: Layout, noise: Noise | None, device: str, neutral: Neutral | None) -> None:
        self.neutral = neutral or nullcontext()
        self.job, self.layout, self.noise, self.device = job, layout, noise, device
        self.replicas = range(layout.replicas)
        self.model = job.model().to(device)
        self.start = _copy(self.model.state_dict())
        if noise:
            noise.shake(self.model.parameters())
        self.turns = turns_of(job, self.model)
        self.scheduled = scheduled(self.turns)
        self.scheduler = job.scheduler.make(self.scheduled) if job.scheduler else None
        self.states = [ReplicaState(self.model) for _ in self.replicas]
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.gradients: list[Gradient] = []  # [replica], of the step so far
        self.rank0_gradient: Gradient = []  # of the first step, or of each phase's first
        self.before_last: list[Gradient] = []  # [replica], of the first step without its last micro-batch
        self.micro_batches: list[list[MicroBatch]] = [[] for _ in self.replicas]
        self.rates: list[list[float]] = []
        self.norms: list[float] = []
        self.draws = False
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad and job.ema]
        self.average = {name: p.detach().clone() for name, p in trained}

    def step(self, step: int) -> None:
        """One step: every micro-batch of every replica forward and backward, then the optimizer once."""
        turn = self.turns[step % len(self.turns)]
        first = step < len(self.turns)
        plan = step_rows(self.job, self.layout, step)
        total = sum(weight(self.job, rows) for of_replica in plan for rows in of_replica)
        self.gradients = [[None] * len(self.parameters) for _ in self.replicas]
        for micro, of_replica in enumerate(plan):
            if first and 0 < micro == len(plan) - 1:
                before: list[Gradient] = self.before_last or [[] for _ in self.replicas]
                self.before_last = [filled(*pair) for pair in zip(before, self.gradients)]
            if micro == 0 and self.layout.buffers == "rank0":
                for state in self.states[1:]:
                    state.buffers = _copy(self.states[0].buffers)
            if self.noise and self.noise.reverses:
                of_replica = [rows[::-1] for rows in of_replica]
            forward = Forward(turn, step // per_epoch(self.job), step, micro, of_replica, total)
            if self.job.gather_outputs and self.layout.replicas > 1:
                forward.all_rows = self._over_all_rows(forward)
            for replica in self.replicas:
                self.micro_batches[replica].append(self._micro_batch(forward, replica))
        if first:
            self.rank0_gradient = filled(self.rank0_gradient, self.gradients[0])
        self._optimizer_step(step, turn)

    def _micro_batch(self, forward: Forward, replica: int) -> MicroBatch:
        """One replica's part of a micro-batch; nothing happens where it has no rows."""
        rows = forward.rows[replica]
        data, weighs = fetch(self.job, rows, forward.epoch, self.device), weight(self.job, rows)
        loss = self._forward_and_backward(forward, replica, data, weighs) if rows else 0.0
        digested = [] if self.noise else digests(data, len(rows))
        return MicroBatch(forward.epoch, forward.step, forward.micro, rows, weighs, digested, loss)

    def _forward_and_backward(self, forward: Forward, replica: int, data: Any, weighs: float) -> float:
        """Adds to a replica's gradient, from its own state and random numbers. Returns the rows' mean loss."""
        job, step, micro = forward.turn.job, forward.step, forward.micro
        if not forward.outputs:
            self.states[replica].restore(self.model)
        for parameter, gradient in zip(self.parameters, self.gradients[replica]):
            parameter.grad = gradient
        torch.manual_seed(seeded(job.seed, "replica", step, micro, replica).initial_seed())
        all_rows = forward.all_rows
        batch = all_rows.batches[replica] if all_rows else self._batch(forward, replica, data)
        before = random_state(self.device)
        if job.sync_batchnorm and self.layout.replicas > 1 and not forward.outputs:
            with self.neutral:
                forward.outputs = outputs_together(
                    job, self.model, forward.rows, step, micro, forward.epoch, self.noise, forward.turn.number
                )
        share = weighs * self.layout.replicas / forward.total  # the mean over the replicas is then that over the rows
        if forward.all_rows:
            share = float(self.layout.replicas)  # the mean over the replicas is then their sum
        scale = self.noise.scale if self.noise else 1.0
        with self.neutral:
            output = forward.outputs[replica] if forward.outputs else job.forward(self.model, batch)
            loss = all_rows.stand_in(replica, output) if all_rows else job.criterion(output, batch)
            if loss.dim() != 0:
                raise not_a_scalar(list(loss.shape))
            self.draws = self.draws or not torch.equal(before, random_state(self.device))
            (loss * (share * scale)).backward(retain_graph=bool(forward.outputs))
        mean_loss = all_rows.loss if all_rows else float(loss.detach())
        if not isfinite(mean_loss):
            raise NotFinite(
                f"the loss is not finite at step {step} of the proof: {mean_loss}; "
                "look at the data and the criterion, or lower the learning rate"
            )
        self.gradients[replica] = forward.turn.own([p.grad for p in self.parameters])
        self.states[replica] = ReplicaState(self.model)
        return mean_loss

    def _batch(self, forward: Forward, replica: int, data: Any) -> Batch:
        rows = forward.rows[replica]
        weighs, phase = weight(self.job, rows), forward.turn.number
        part = place(forward.step, forward.micro, rows, forward.epoch, weighs, phase)
        return Batch(self.noise.shaken(data) if self.noise else data, part)

    def _over_all_rows(self, forward: Forward) -> AllRows:
        """The loss over all replicas' rows. Their outputs are computed here without a graph, and in each replica's turn
        again: each needs its own state then, too."""
        job = forward.turn.job
        if job.sync_batchnorm:
            raise UserError("the proof takes sync_batchnorm or gather_outputs, not both; verify it with one of them")
        batches, outputs = {}, {}
        for replica in (each for each in self.replicas if forward.rows[each]):
            data = fetch(job, forward.rows[replica], forward.epoch, self.device)
            batches[replica] = self._batch(forward, replica, data)
            self.states[replica].restore(self.model)
            torch.manual_seed(seeded(job.seed, "replica", forward.step, forward.micro, replica).initial_seed())
            with torch.no_grad(), self.neutral:
                outputs[replica] = job.forward(self.model, batches[replica])
        with self.neutral:
            found = over_all_rows(job, outputs, batches, self.device)
        self.draws = self.draws or found.draws
        return found

    def _optimizer_step(self, step: int, turn: Turn) -> None:
        """The mean of the replicas' gradients, clipped; the phase's optimizer; the scheduler where it is due."""
        for parameter, gradient in zip(self.parameters, _mean(self.gradients, reverse=self.noise is not None)):
            parameter.grad = gradient
        if self.noise:
            present = [p.grad for p in self.parameters if p.grad is not None]
            self.noise.shake(gradient.div_(self.noise.scale) for gradient in present)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.job.clip_norm or float("inf"))
        self.norms.append(float(norm))
        self.rates.append([float(group["lr"]) for group in self.scheduled.param_groups if group["params"]])
        turn.optimizer.step()
        if self.noise and self.noise.rounds_weights:
            self.noise.shake(self.parameters)
        if self.job.ema:
            moved = [p for p, own in zip(self.parameters, turn.owns) if own]
            for name, parameter in self.model.named_parameters():
                if any(parameter is p for p in moved):
                    kept, new = self.job.ema * self.average[name], (1.0 - self.job.ema) * parameter.detach()
                    self.average[name] = kept + new
        ends_epoch = (step + 1) % per_epoch(self.job) == 0
        every = self.job.scheduler.every if self.job.scheduler else None
        ends_round = turn is self.turns[-1]
        if ends_round and turn.optimizer is not self.scheduled:
            self.scheduled.step()  # a scheduler warns where it has not been called
        if self.scheduler and ((every == "step" and ends_round) or (every == "epoch" and ends_epoch)):
            self.scheduler.step()
        if self.scheduler and self.job.scheduler and every == "evaluation":
            after_evaluation(self.job, self.scheduler, evaluate(self.job, self._state(), self.device))

    def _state(self) -> dict[str, Tensor]:
        """The weights as they are evaluated and saved: averaged where the job asks for it, with replica 0's buffers."""
        self.states[0].restore(self.model)
        state = _copy(self.model.state_dict())
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):  # tied weights have several
            if names[id(parameter)] in self.average:
                state[name] = self.average[names[id(parameter)]].clone()
        return state

    def result(self) -> TrainingResult:
        """What was seen, and the weights with replica 0's buffers, evaluated."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        later = () if self.noise else LATER
        state = self._state()
        return TrainingResult(
            micro_batches=self.micro_batches,
            later={epoch: step_rows(self.job, self.layout, epoch * per_epoch(self.job)) for epoch in later},
            rates=self.rates,
            norms=self.norms,
            draws=self.draws,
            start=self.start,
            state=state,
            buffers=[state.buffers for state in self.states],
            rank0_gradient=_present(names, self.rank0_gradient),
            before_last=_present(names, _mean(self.before_last)),
            rank0_before_last=_present(names, self.before_last[0]) if self.before_last else {},
            evaluation=evaluate(self.job, state, self.device),
        )


def _mean(gradients: list[Gradient], reverse: bool = False) -> Gradient:
    """Over the replicas, whose share of the step their losses hold already: added in order, or in reverse."""
    means: Gradient = []
    for of_replicas in zip(*gradients):
        present = [g for g in of_replicas if g is not None]
        ordered = present[::-1] if reverse else present
        means.append(sum(ordered, torch.zeros_like(ordered[0])) / len(gradients) if present else None)
    return means


def _present(names: list[str], gradient: Gradient) -> dict[str, Tensor]:
    return {name: g for name, g in zip(names, gradient) if g is not None}


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in state.items() if isinstance(t, Tensor)}
