"""reference: one process that plays every replica in turn. It defines what N ranks must compute.

Slow on purpose and independent on purpose: it has its own schedule, share and evaluation, and imports none of ours,
because a fault that both sides share is invisible. From samestep it takes plain values only.
"""

from __future__ import annotations

import hashlib
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.engine import Layout
from samestep.errors import UserError, not_a_scalar
from samestep.job import Batch, Job, Part

EVALUATION_ROWS = 16  # at a time


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

    for step in range(steps):
        plan = _step(job, layout, step)
        whole = sum(_weight(job, rows) for micro in plan for rows in micro)
        gradients: list[list[Tensor | None]] = [[None] * len(parameters) for _ in replicas]
        for micro, of_replica in enumerate(plan):
            if micro == len(plan) - 1 and layout.buffers == "rank0":
                buffers = [_copy(buffers[0]) for _ in replicas]
            for replica in replicas:
                rows, loss_mean = of_replica[replica], 0.0
                data = _fetch(job, rows, step, device)
                digests = _digests(data, len(rows))
                if rows:
                    _restore(dict(model.named_buffers()), buffers[replica])
                    for parameter, gradient in zip(parameters, gradients[replica]):
                        parameter.grad = gradient
                    _seed(job.seed, "replica", step, micro, replica, device=device)
                    if noise:
                        data = noise.shaken(data, reverse=not noise.draws)
                    before = _random_state(device)
                    batch = Batch(data, _place(step, micro, rows))
                    loss = job.criterion(job.forward(model, batch), batch)
                    if loss.dim() != 0:
                        raise not_a_scalar(list(loss.shape))
                    draws = draws or not torch.equal(before, _random_state(device))
                    (loss * (_weight(job, rows) / whole * (noise.scale if noise else 1.0))).backward()
                    loss_mean = float(loss.detach())
                    if not isfinite(loss_mean):
                        raise UserError(
                            f"the loss is not finite at step {step} of the proof: {loss_mean}; "
                            "look at the data and the criterion, or lower the learning rate"
                        )
                    gradients[replica] = [p.grad for p in parameters]
                    buffers[replica] = _copy(dict(model.named_buffers()))
                seen[replica].append(
                    {
                        "epoch": step // _per_epoch(job),
                        "step": step,
                        "micro": micro,
                        "indices": rows,
                        "weight": _weight(job, rows),
                        "digests": digests,
                        "loss": loss_mean,
                    }
                )
        if step == 0:
            alone = [None if g is None else g * layout.replicas for g in gradients[0]]
        for i, parameter in enumerate(parameters):
            present = [g for g in (of[i] for of in gradients) if g is not None]
            parameter.grad = sum(reversed(present) if noise else present, torch.zeros_like(parameter))
            if not present:
                parameter.grad = None
        if noise:
            present = [p.grad for p in parameters if p.grad is not None]
            noise.shake(gradient.div_(noise.scale) for gradient in present)
        norm = torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm or float("inf"))
        norms.append(float(norm))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        ends_epoch = (step + 1) % _per_epoch(job) == 0
        if scheduler and (job.scheduler.every == "step" or ends_epoch):  # type: ignore[union-attr]
            scheduler.step()

    _restore(dict(model.named_buffers()), buffers[0])
    named = [name for name, p in model.named_parameters() if p.requires_grad]
    return {
        "seen": seen,
        "rates": rates,
        "norms": norms,
        "draws": draws,
        "start": start,
        "state": _copy(model.state_dict()),
        "buffers": buffers,
        "rank0_gradient": {n: g for n, g in zip(named, alone) if g is not None},
        "evaluation": _evaluate(job, model, device),
    }


class Noise:
    """Rounding, made visible: every value moves by up to one unit in the last place of `dtype`."""

    def __init__(self, dtype: torch.dtype, seed: int, draws: bool) -> None:
        self.eps, self.draws = torch.finfo(dtype).eps, draws
        self.scale = 1.0 + 2 * seed  # 3 or 5: engines scale losses by the ranks and gradients back, which rounds
        self.generator = torch.Generator().manual_seed(seed)

    def _moved(self, tensor: Tensor) -> Tensor:
        unit = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float64) * 2 - 1
        return tensor * (1 + self.eps * unit.to(tensor.device)).to(tensor.dtype)

    def shake(self, tensors: Any) -> None:
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self._moved(tensor))

    def shaken(self, data: Any, reverse: bool) -> Any:
        """`data` with its floating values moved, and its rows reversed unless dropout would then hit other rows."""

        def change(tensor: Tensor) -> Tensor:
            moved = self._moved(tensor) if tensor.is_floating_point() else tensor
            return moved.flip(0) if reverse and tensor.dim() else moved

        return tree_map_only(torch.Tensor, change, data)


# The schedule, written a second time and in another way than data/schedule.py.


def _per_epoch(job: Job) -> int:
    length, batch = len(job.train), job.global_batch
    return length // batch if job.last == "drop" else ceil(length / batch)


def _step(job: Job, layout: Layout, step: int) -> list[list[list[int]]]:
    """[micro-batch][replica] -> sample indices of this step."""
    epoch, number = step // _per_epoch(job), step % _per_epoch(job)
    order = torch.randperm(len(job.train), generator=_seeded(job.seed, "order", epoch)).tolist()
    rows = order[number * job.global_batch :][: job.global_batch]
    processes = 1 if layout.split == "chunk" else layout.replicas
    most = ceil(job.global_batch / processes)
    count = 1
    while job.micro_batch and ceil(most / count) > job.micro_batch:
        count += 1
    shares = [_deal(of_process, count) for of_process in _deal(rows, processes)]
    by_micro = [[share[micro] for share in shares] for micro in range(count)]
    if layout.split == "even":
        return by_micro
    chunks = []
    for (rows_here,) in by_micro:
        size = ceil(len(rows_here) / layout.replicas) or 1
        chunks.append([rows_here[i * size : (i + 1) * size] for i in range(layout.replicas)])
    return chunks


def _deal(rows: list[int], hands: int) -> list[list[int]]:
    """Counts dealt one by one, as cards are; then each hand takes so many from the top."""
    counts = [0] * hands
    for i in range(len(rows)):
        counts[i % hands] += 1
    rest = list(rows)
    dealt = []
    for count in counts:
        dealt.append(rest[:count])
        rest = rest[count:]
    return dealt


def _weight(job: Job, rows: list[int]) -> float:
    return float(sum(job.weight(i) if job.weight else 1 for i in rows))


def _fetch(job: Job, rows: list[int], step: int, device: str) -> Any:
    samples = [job.train[i] for i in rows]
    if job.augment:
        epoch = step // _per_epoch(job)
        samples = [job.augment(s, _seeded(job.seed, "augment", epoch, i)) for s, i in zip(samples, rows)]
    return _collate(job, samples, device) if samples else None


def _collate(job: Job, samples: list[Any], device: str) -> Any:
    data = (job.collate or torch.utils.data.default_collate)(samples)
    return tree_map_only(torch.Tensor, lambda t: t.to(device), data)


def _evaluate(job: Job, model: torch.nn.Module, device: str) -> dict[str, Any] | None:
    if job.evaluation is None:
        return None
    model.eval()
    sums, weight = dict.fromkeys(["loss", *job.metrics], 0.0), 0.0
    length = len(job.evaluation)
    with torch.no_grad():
        for first in range(0, length, EVALUATION_ROWS):
            rows = list(range(first, min(first + EVALUATION_ROWS, length)))
            batch = Batch(_collate(job, [job.evaluation[i] for i in rows], device), _place(0, 0, rows))
            output = job.forward(model, batch)
            weighs = sum(job.evaluation_weight(i) if job.evaluation_weight else 1.0 for i in rows)
            sums["loss"] += float(job.criterion(output, batch)) * weighs
            weight += weighs
            for name, metric in job.metrics.items():
                sums[name] += float(metric(output, batch).double().sum())
    return {"rows": length, "weight": weight, "sums": sums}


def _place(step: int, micro: int, rows: list[int]) -> Part:
    return Part(
        epoch=0,
        step=step,
        micro=micro,
        indices=torch.tensor(rows, dtype=torch.int64).numpy(),
        rows=len(rows),
        weight=float(len(rows)),
        share=1.0,
        completes_step=True,
        completes_epoch=False,
    )


def _seeded(*path: int | str) -> torch.Generator:
    digest = hashlib.blake2b("/".join(str(p) for p in path).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") // 2)


def _seed(*path: int | str, device: str) -> None:
    torch.manual_seed(_seeded(*path).initial_seed())


def _random_state(device: str) -> Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def _digests(data: Any, rows: int) -> list[str]:
    """Of each row, the bytes of its tensors in the batch's order."""
    out = []
    for row in range(rows):
        state = hashlib.blake2b(digest_size=6)
        for tensor in tree_leaves(data):
            if isinstance(tensor, Tensor) and tensor.dim() > 0:
                state.update(bytes(tensor[row].cpu().contiguous().reshape(-1).view(torch.uint8).tolist()))
        out.append(state.hexdigest())
    return out


def _copy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _restore(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in source.items():
            target[name].data.copy_(tensor)
