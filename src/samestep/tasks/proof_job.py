"""Makes the job that a proof trains: the user's job on a subset of its rows, in the proof's dtype and optimizer.

Five trainings: `gradient` (one step of plain SGD at rate 1, nothing clipped: the weights' change is the first
gradient), `sgd` (SGD with momentum, which decides), `late` (the same, with averaged weights, over the ends of later
epochs of a few rows), `life` (the same rows, trained as `samestep run` does, with a restart) and `user` (the job's own
optimizer, which confirms; with it averaged weights are compared).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from samestep.data.part import cast_to, part_of
from samestep.data.schedule import schedule_of
from samestep.data.stream import is_stream
from samestep.job import ByLength, Job, Lanes, Recipe, Weighted, with_recipes
from samestep.rank.evaluate import chunk_rows
from samestep.records.plan import OWN_DTYPE, ProveTask

EMA = 0.8  # the highest decay in a proof, whose few steps would hardly move a slower average
LATE_EPOCHS = (1, 2, 96)  # over whose ends `late` trains
TWO_BATCHES = 2  # of which an epoch of `late` consists
OTHER_STEPS = 8  # of the other trainings, unless a step is costly


@dataclass(frozen=True)
class LifeSteps:
    """The steps of a run that is stopped and started again: see records.reference_record.ReferenceLifeRecord."""

    every: int
    stop: int
    steps: int
    checkpoint_every: int


def life_steps(training: ProveTask, phases: int) -> LifeSteps:
    """Returns the steps of `life`: two evaluations before the restart, two after it, and a checkpoint in between, which
    a step follows. Fewer where the other trainings have few."""
    of_rounds = (1, 2, 4, 2) if training.steps < OTHER_STEPS else (2, 5, 8, 4)
    return LifeSteps(*(max(1, phases) * rounds for rounds in of_rounds))


def proof_job(job: Job, training: ProveTask) -> Job:
    """Returns `job` with the training's dtype and optimizer, on a subset with an uneven last batch.

    The steps of the training reach the subset's second epoch. Where the training's rows are the job's global batch, the
    job refuses other sizes: every batch then has one that the job really has.
    """
    own_sizes = training.rows == job.global_batch
    job = with_fewer_rows(job, training.rows, training.replicas)
    dtype = None if training.dtype == OWN_DTYPE else getattr(torch, training.dtype)
    sample_dtype = None if job.collate else dtype  # a job's collate creates the tensors; its result is cast
    evaluated_dtype = None if job.evaluation_collate else sample_dtype
    rows = _rows_of_subset(job, training, own_sizes)
    evaluated = (
        [] if job.evaluation is None else _spread(job.evaluation, evaluated_rows(job, training.replicas, own_sizes))
    )
    small = replace(
        job,
        model=lambda: _in_dtype(with_own_tensors(job.model()), dtype),
        collate=_with_cast(job.collate, dtype),
        evaluation_collate=_with_cast(job.evaluation_collate, dtype),
        augment=_with_cast(job.augment, dtype),
        train=part_of(job.train, rows, None if job.augment else sample_dtype),
        weight=_renumbered(job.weight, rows),
        batch_weight=_in_float64(job.batch_weight) if dtype == torch.float64 else job.batch_weight,
        order=_subset_order(job.order, rows),
        evaluation=None if job.evaluation is None else part_of(job.evaluation, evaluated, evaluated_dtype),
        evaluation_weight=_renumbered(job.evaluation_weight, evaluated),
    )
    if training.training == "gradient":  # nothing is evaluated: 'sgd' and 'user' are
        plain = replace(small, scheduler=None, clip_norm=None, ema=None, evaluation=None)
        return with_recipes(plain, lambda recipe: Recipe(torch.optim.SGD, {"lr": 1.0}))
    is_life = training.training == "life"
    by_evaluation = job.scheduler is not None and job.scheduler.every == "evaluation"
    if not by_evaluation and (training.training == "late" or (training.dtype == OWN_DTYPE and not is_life)):
        small = replace(small, evaluation=None)  # the others' weights are evaluated
    small = replace(small, ema=min(job.ema, EMA) if job.ema and training.training != "sgd" else None)
    if is_life:
        steps = life_steps(training, len(job.phases)).steps
        small = replace(small, max_steps=steps, on_step=None, on_evaluation=None)
    if training.training == "user":
        return small
    return with_recipes(small, lambda recipe: _sgd(recipe, training.sgd_lr))


def _in_dtype(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Casts a model's floating-point tensors, where a dtype is given. Not complex ones, such as rotary positions, which
    Module.to would make real."""
    if dtype is None:
        return model
    cast: nn.Module = model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    return cast


def with_own_tensors(model: nn.Module) -> nn.Module:
    """Gives a model's floating-point parameters and buffers memory of their own, and returns it.

    A job's file may hold tensors that each of its models takes as they are, as a graph's features in a buffer or
    pretrained vectors in an embedding. What one training of a proof writes there, the next one would begin with.
    """
    parameters = [parameter for parameter in model.parameters() if _is_plain(parameter.data)]
    buffers = [buffer for buffer in model.buffers() if _is_plain(buffer)]
    views = Counter(tensor.untyped_storage()._cdata for tensor in (*parameters, *buffers))
    copies: dict[int, torch.UntypedStorage] = {}

    def own(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if views[storage._cdata] == 1 or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().resolve_conj().resolve_neg().clone()
        # Tensors that share memory still do in the copy.
        if storage._cdata not in copies:
            copies[storage._cdata] = storage.clone()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(copies[storage._cdata], *place)

    for parameter in parameters:
        parameter.data = own(parameter.data)
    own_buffers = {id(buffer): own(buffer).requires_grad_(buffer.requires_grad) for buffer in buffers}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = own_buffers.get(id(buffer), buffer)
    return model


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's values lie in its storage, and are no whole numbers: a model counts in these, also by other
    names that it has for the same tensor."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device.type == "meta":
        return False
    return tensor.is_floating_point() or tensor.is_complex()


def with_fewer_rows(job: Job, rows: int, replicas: int) -> Job:
    """Returns `job` with `rows` rows a step, in as many micro-batches as before; unchanged for 0 and for its own."""
    if rows in (0, job.global_batch):
        return job
    micro_batch = None
    if job.micro_batch:
        micro_batch = ceil(ceil(rows / replicas) / schedule_of(job, replicas).micro_batches)
    return replace(job, global_batch=rows, micro_batch=micro_batch)


def _rows_of_subset(job: Job, training: ProveTask, own_sizes: bool) -> list[int]:
    """Returns the rows that the proof trains: with Lanes, as many lanes as its steps have rows, each contiguous."""
    length, batch = len(job.train), job.global_batch
    if training.training in ("late", "life"):
        training = replace(training, steps=TWO_BATCHES * max(1, len(job.phases)))
    rows = subset_length(length, batch, training, max(1, len(job.phases)), own_sizes=own_sizes)
    if job.carry_state:
        rows = min(length, max(rows, 2 * batch))  # two steps in an epoch: the second one continues the first
    if not isinstance(job.order, Lanes):
        return _spread(job.train, rows, training.extremes)
    steps = rows // batch
    lanes = [lane * (length // batch) + step for lane in range(batch) for step in range(steps)]
    return lanes + list(range(length - (rows - len(lanes)), length))


def steps_of(training: ProveTask, job: Job, steps_per_epoch: int) -> tuple[int, ...]:
    """Returns the optimizer steps that a training of the proof takes in turn, by their number in the whole schedule.

    The first ones: one for a gradient, or one of each phase. `late`: the last one of some epochs, and those after it;
    fewer where the other trainings have few. job: the proof's.
    """
    phases, few = max(1, len(job.phases)), training.steps < OTHER_STEPS
    if training.training == "life":
        return tuple(range(life_steps(training, phases).steps))
    if training.training != "late":
        return tuple(range(phases if training.training == "gradient" else training.steps))
    ends = [(epoch + 1) * steps_per_epoch - phases for epoch in (LATE_EPOCHS[1:] if few else LATE_EPOCHS)]
    return tuple(sorted({step for end in ends for step in range(end, end + (2 if few else 3) * phases)}))


def subset_length(
    length: int, global_batch: int, training: ProveTask, phases: int = 1, *, own_sizes: bool = False
) -> int:
    """Returns how many rows the proof's subset has: full batches, then one that does not divide among the replicas.

    That one is as large as the job's last batch if it does not divide (replicas may then get no rows), else about half
    a batch, as where the proof takes fewer rows than the job. The steps reach the second epoch. A smaller dataset is
    taken whole. own_sizes: it is always as large as the job's; there may be none.
    """
    replicas = training.replicas
    last = length % global_batch
    uneven = max(global_batch // 2, min(2 * replicas, global_batch - 1))
    while replicas > 1 and uneven < global_batch - 1 and uneven % replicas == 0:
        uneven += 1
    if own_sizes or (last % replicas and not training.rows):
        uneven = last
    batches = training.steps // phases
    full_batches = max(1, batches * 5 // 8 - 1)  # of 8 batches: 4 whole, 1 uneven, then 3 of the next epoch
    return min(length, full_batches * global_batch + uneven)


def evaluated_rows(job: Job, replicas: int, own_sizes: bool = False) -> int:
    """Returns how many rows the proof evaluates: just over two batches, and as much as gives each of eight replicas a
    part; not divisible among the replicas.

    own_sizes: two of the batches that an evaluation of the job has, and its incomplete last one.
    """
    if job.evaluation is None:
        return 0
    rows, length = 2 * job.global_batch + 1, len(job.evaluation)
    if own_sizes:
        at_once = chunk_rows(job)
        return min(length, 2 * at_once + length % at_once)
    rows = max(rows, (min(replicas, 8) - 1) * chunk_rows(job) + 1)  # a replica evaluates whole chunks
    while replicas > 1 and rows % replicas == 0:
        rows += 1
    return min(length, rows)


def _spread(dataset: Any, rows: int, extremes: Sequence[int] = ()) -> list[int]:
    """Returns `rows` indices: a stream's first, else evenly spaced, because many datasets are sorted by class.

    extremes: rows of which the first ones take the places of a quarter of these.
    """
    if is_stream(dataset):
        return list(range(rows))
    even = [i * len(dataset) // rows for i in range(rows)]
    wanted = [row for row in extremes if row not in even][: rows // 4]
    left = rows - len(wanted)
    return sorted([*wanted, *(even[i * rows // left] for i in range(left))])


def extreme_rows(job: Job, training: ProveTask) -> list[int]:
    """Returns the indices in the proof's subset of the extreme rows that it holds."""
    own_sizes = training.rows == job.global_batch
    rows = _rows_of_subset(with_fewer_rows(job, training.rows, training.replicas), training, own_sizes)
    places = {row: place for place, row in enumerate(rows)}
    return [places[row] for row in training.extremes if row in places]


def _renumbered(weight: Callable[[int], float] | None, rows: list[int]) -> Callable[[int], float] | None:
    """Returns `weight` as a function of the index in the subset, whose samples are at `rows`."""
    return (lambda index: weight(rows[index])) if weight else None


def _subset_order(order: Any, rows: list[int]) -> Any:
    """Returns Job.order for the subset, whose samples are at `rows`; an epoch has as many rows as the subset."""
    if isinstance(order, Weighted):
        weights = [float(order.weights[row]) for row in rows]
        return Weighted(weights if any(weights) else [1.0] * len(rows))
    if isinstance(order, ByLength):
        return ByLength([order.lengths[row] for row in rows], order.buckets)
    if order is None or isinstance(order, Lanes):
        return order
    place = {row: position for position, row in enumerate(rows)}

    def of_subset(epoch: int, generator: torch.Generator) -> list[int]:
        """The function's order without the rows that the subset lacks; again from the beginning where it is short."""
        positions = [place[row] for row in map(int, order(epoch, generator)) if row in place]
        return [positions[i % len(positions)] for i in range(len(rows))] if positions else list(range(len(rows)))

    return of_subset


class Float64Mode(TorchDispatchMode):
    """Computes in float64 what is asked for in a lower precision; a tensor that is changed in place keeps its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changes = func._schema.is_mutable and args and isinstance(args[0], Tensor)
        dtype = args[0].dtype if changes else torch.float64
        args, kwargs = (_cast_tensors(part, dtype) for part in (args, kwargs or {}))
        made = func(*args, **kwargs)
        return made if changes else _cast_tensors(made, dtype)


def _cast_tensors(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def _in_float64(batch_weight: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Wraps a function that adds up a batch's weights: sums of float32 class weights differ by rounding where they are
    added up in other parts, which in the proof's float64 would be taken for a mistake of the job."""

    def in_float64(batch: Any) -> Any:
        assert batch_weight
        with Float64Mode():  # type: ignore[no-untyped-call]
            return batch_weight(batch)

    return in_float64 if batch_weight else None


def _with_cast(function: Callable[..., Any] | None, dtype: torch.dtype | None) -> Callable[..., Any] | None:
    """Wraps `function` so that its result is cast to `dtype`, where there is one."""
    return (lambda *args: cast_to(function(*args), dtype)) if function and dtype else function


def _sgd(recipe: Recipe, lr: float) -> Recipe:
    """Returns SGD with momentum over the recipe's parameter groups.

    The groups keep their weight decay and the ratio of their learning rates.
    """
    base = recipe.settings.get("lr", 1e-3)
    groups = recipe.groups

    def sgd_groups(model: nn.Module) -> list[dict[str, Any]]:
        assert groups is not None
        built: list[Any] = list(groups(model))
        if not all(isinstance(group, dict) for group in built):  # plain parameters, which torch accepts too
            built = [{"params": built}]
        return [
            {
                "params": group["params"],
                "lr": lr * group["lr"] / base if "lr" in group else lr,
                "weight_decay": group.get("weight_decay", 0.0),
            }
            for group in built
        ]

    return Recipe(torch.optim.SGD, {"lr": lr, "momentum": 0.9}, sgd_groups if groups else None)


CHEAP_FLOP = 0.25e9  # of a step: some 0.1 s in float64 on one core
COSTLY_FLOP = 20e9
OF_PARAMETER = 2500  # what updating, shaking and comparing a parameter takes, as so many FLOP
BACKWARD = 3  # a forward and a backward pass cost about three forward passes


def rows_of_proof(job: Job, replicas: int, forward_flop: float, parameters: int, least: int = 0) -> tuple[int, bool]:
    """Returns the rows of a step of the proof, 0 for the job's global batch, and whether such a step is costly.

    forward_flop: of one row's forward pass. Every replica gets two rows or more in each of its micro-batches, also of
    the uneven last batch. least: rows that an engine needs, which has micro-batches of its own.
    """
    of_row, of_model = BACKWARD * forward_flop, OF_PARAMETER * parameters
    micro_batches = replicas * schedule_of(job, replicas).micro_batches
    fewest = micro_batches * (3 if micro_batches == replicas else 4)
    affordable = int(CHEAP_FLOP / of_row) // micro_batches * micro_batches if of_row else job.global_batch
    rows = max(fewest, affordable, least)
    if rows >= job.global_batch:
        return 0, of_row * job.global_batch + of_model > COSTLY_FLOP
    return rows, of_row * rows + of_model > COSTLY_FLOP
