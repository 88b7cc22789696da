"""play(job, layout, steps): the training itself, replica after replica."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from samestep.engine import Layout
from samestep.errors import NotFinite, not_a_scalar
from samestep.job import Batch, Job
from samestep.reference.evaluation import evaluate
from samestep.reference.fetch import digests, fetch, place, random_state
from samestep.reference.noise import Noise
from samestep.reference.schedule import per_epoch, seeded, step_rows, weight
from samestep.reference.together import outputs_together

LATER = (2, 3, 97)  # epochs whose rows are told without training on them


def play(job: Job, layout: Layout, steps: int, *, noise: Noise | None = None, device: str = "cpu") -> dict[str, Any]:
    """Trains `job` for `steps` steps as `layout` lays them out. With `noise`, a second run that differs by rounding.

    Returns what every replica saw and the final state: see docs/proof.md, "What is compared".
    """
    model = job.model().to(device)
    start = _copy(model.state_dict())
    if noise:
        noise.shake(model.parameters())
    optimizer = job.optimizer.build(model)
    scheduler = job.scheduler.make(optimizer) if job.scheduler else None
    replicas = range(layout.replicas)
    buffers = [_copy(dict(model.named_buffers())) for _ in replicas]
    parameters = [p for p in model.parameters() if p.requires_grad]
    seen: list[list[dict[str, Any]]] = [[] for _ in replicas]
    rates, norms, alone, draws = [], [], [], False
    before_last: list[list[Tensor | None]] = []  # of each replica, the first step's without its last micro-batch

    for step in range(steps):
        epoch, plan = step // per_epoch(job), step_rows(job, layout, step)
        whole = sum(weight(job, rows) for micro in plan for rows in micro)
        gradients: list[list[Tensor | None]] = [[None] * len(parameters) for _ in replicas]
        for micro, of_replica in enumerate(plan):
            if step == 0 and 0 < micro == len(plan) - 1:
                before_last = [[None if g is None else g.clone() for g in of] for of in gradients]
            if micro == 0 and layout.buffers == "rank0":
                buffers = [_copy(buffers[0]) for _ in replicas]
            of_replica = [rows[::-1] for rows in of_replica] if noise and noise.reverses else of_replica
            outputs: list[Any] = []
            for replica in replicas:
                rows, loss_mean = of_replica[replica], 0.0
                data, weighs = fetch(job, rows, epoch, device), weight(job, rows)
                if rows:
                    if not outputs:
                        _restore(dict(model.named_buffers()), buffers[replica])
                    for parameter, gradient in zip(parameters, gradients[replica]):
                        parameter.grad = gradient
                    torch.manual_seed(seeded(job.seed, "replica", step, micro, replica).initial_seed())
                    if noise:
                        data = noise.shaken(data)
                    before = random_state(device)
                    batch = Batch(data, place(step, micro, rows, epoch, weighs))
                    if job.sync_batchnorm and layout.replicas > 1:
                        outputs = outputs or outputs_together(job, model, of_replica, step, micro, epoch, noise)
                    output = outputs[replica] if outputs else job.forward(model, batch)
                    loss = job.criterion(output, batch)
                    if loss.dim() != 0:
                        raise not_a_scalar(list(loss.shape))
                    draws = draws or not torch.equal(before, random_state(device))
                    share = weighs * layout.replicas / whole
                    (loss * (share * (noise.scale if noise else 1.0))).backward(retain_graph=bool(outputs))
                    loss_mean = float(loss.detach())
                    if not isfinite(loss_mean):
                        raise NotFinite(
                            f"the loss is not finite at step {step} of the proof: {loss_mean}; "
                            "look at the data and the criterion, or lower the learning rate"
                        )
                    gradients[replica] = [p.grad for p in parameters]
                    buffers[replica] = _copy(dict(model.named_buffers()))
                seen[replica].append(
                    {
                        "epoch": epoch,
                        "step": step,
                        "micro": micro,
                        "indices": rows,
                        "weight": weighs,
                        "digests": [] if noise else digests(data, len(rows)),
                        "loss": loss_mean,
                    }
                )
        if step == 0:
            alone = [None if g is None else g.clone() for g in gradients[0]]
        for parameter, gradient in zip(parameters, _mean(gradients, reverse=noise is not None)):
            parameter.grad = gradient
        if noise:
            present = [p.grad for p in parameters if p.grad is not None]
            noise.shake(gradient.div_(noise.scale) for gradient in present)
        norm = torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm or float("inf"))
        norms.append(float(norm))
        rates.append([float(group["lr"]) for group in optimizer.param_groups if group["params"]])
        optimizer.step()
        if noise and noise.rounds_weights:
            noise.shake(parameters)
        ends_epoch = (step + 1) % per_epoch(job) == 0
        if scheduler and (job.scheduler.every == "step" or ends_epoch):  # type: ignore[union-attr]
            scheduler.step()

    _restore(dict(model.named_buffers()), buffers[0])
    named = [name for name, p in model.named_parameters() if p.requires_grad]
    return {
        "seen": seen,
        "later": {str(epoch): step_rows(job, layout, epoch * per_epoch(job)) for epoch in LATER if not noise},
        "rates": rates,
        "norms": norms,
        "draws": draws,
        "start": start,
        "state": _copy(model.state_dict()),
        "buffers": buffers,
        "rank0_gradient": _present(named, alone),
        "before_last": _present(named, _mean(before_last)) if before_last else {},
        "rank0_before_last": _present(named, before_last[0]) if before_last else {},
        "evaluation": evaluate(job, _copy(model.state_dict()), device),
    }


def _mean(gradients: list[list[Tensor | None]], reverse: bool = False) -> list[Tensor | None]:
    """Over the replicas, whose share of the step their losses hold already: added in order, or in reverse."""
    means = []
    for of_replicas in zip(*gradients):
        present = [g for g in of_replicas if g is not None]
        ordered = present[::-1] if reverse else present
        means.append(sum(ordered, torch.zeros_like(ordered[0])) / len(gradients) if present else None)
    return means


def _present(names: list[str], gradients: list[Tensor | None]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in zip(names, gradients) if gradient is not None}


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in state.items() if isinstance(t, Tensor)}


def _restore(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in source.items():
            target[name].data.copy_(tensor)
