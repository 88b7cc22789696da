"""What a step may need besides forward and backward: phases, a closure, a carried state, the rows of all ranks."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.data.fingerprint import gather_from_ranks
from samestep.data.schedule import Schedule, key
from samestep.errors import Refused, UserError
from samestep.job import Batch, Job, MicroBatch, Phase, output_and_state
from samestep.job.phases import parameters_of
from samestep.job.walk import flattened, leaves_of, mapped_tensors, outline
from samestep.message import Message, message
from samestep.rank.digests import bytes_of
from samestep.rank.weights import StateDict
from samestep.world import World

OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
KEPT = (bool, int, float, str, Tensor, tuple, list, dict, set, type(None))  # what a model may keep in others


@dataclass
class StepCount:
    """The steps of a training. first: those that were done before, by the training that it continues; done: these too.

    skipped: of the steps done. drawn: steps whose batches have been handed out; all_drawn: no more are. ends: the steps
    after which patience has ended the training; None: it has not.
    """

    first: int = 0
    done: int = 0
    skipped: int = 0
    drawn: int = 0
    all_drawn: bool = False
    ends: int | None = None

    def continue_from(self, done: int, skipped: int) -> None:
        """Continues the training that has done so many steps."""
        self.first = self.done = self.drawn = done
        self.skipped = skipped


def default_generator(device: str) -> torch.Generator:
    """Returns the default random generator of `device`, which dropout there draws from.

    Seeding it takes 1 µs. torch.manual_seed takes 70 µs: it also queues a seed for CUDA, with a stack trace.
    """
    if device == "cpu":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.device(device).index or 0]


def keep_state(model: nn.Module) -> Callable[[], None]:
    """Returns a function that puts back the buffers of a model and what it keeps in attributes, as a hidden state or a
    count: a rank without rows computes others' rows, and must not change these."""
    modules = [(inner, inner._buffers.copy(), _attributes(inner)) for inner in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]

    def restore() -> None:
        for inner, buffers, attributes in modules:
            inner._buffers.update(buffers)
            for name in _attributes(inner).keys() - attributes.keys():
                del vars(inner)[name]
            for name, (value, copied) in attributes.items():
                vars(inner)[name] = value
                if isinstance(value, list):
                    value[:] = copied
                elif isinstance(value, dict | set):
                    value.clear()
                    value.update(copied)
        for buffer, value in values:
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)  # .data: autograd may hold the buffer

    return restore


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Returns the names of what a module keeps -> the value, and a copy of a container."""
    attributes = {
        name: value for name, value in vars(module).items() if name not in OF_MODULES and isinstance(value, KEPT)
    }
    return {
        name: (value, copy.copy(value) if isinstance(value, list | dict | set) else value)
        for name, value in attributes.items()
    }


class ActivePhase:
    """The phase whose parameters require a gradient, so that backward and the optimizer's step are this phase's alone.

    Not only during the forward pass: activation checkpointing repeats it in the backward pass.
    """

    def __init__(self, phases: Sequence[Phase], model: nn.Module) -> None:
        self._parameters = parameters_of(phases, model) if phases else []
        self._phase: int | None = None

    def activate(self, phase: int) -> None:
        """Lets only this phase's parameters require a gradient."""
        if phase != self._phase:
            self._phase = phase
            for number, parameters in enumerate(self._parameters):
                for parameter in parameters:
                    parameter.requires_grad_(number == phase)

    def end(self) -> None:
        """Lets all phases' parameters require a gradient again."""
        self._phase = None
        for parameters in self._parameters:
            for parameter in parameters:
                parameter.requires_grad_(True)


class Closure:
    """The micro-batches of the current step, and the mean loss over its rows on all ranks.

    again: whether they are being computed again. Then nothing is recorded of them.
    """

    def __init__(self, world: World) -> None:
        self.again = False
        self._world = world
        self._batches: list[Batch] = []
        self._loss = torch.zeros((), device=world.device)

    def add(self, batch: Batch, loss: Tensor) -> None:
        """Takes in the mean loss over the rows of one of the step's micro-batches."""
        if batch.micro_batch.micro == 0:
            self._loss = torch.zeros_like(self._loss, dtype=torch.float64)
            if not self.again:
                self._batches = []
        self._loss += loss.detach() * batch.micro_batch.share
        if not self.again:
            self._batches.append(batch)

    def of_step(self, model: nn.Module, backward: Callable[[Batch], Tensor]) -> Callable[[], Tensor]:
        """Returns the function that the optimizer calls. backward: computes a micro-batch's gradients.

        It sets the gradients and returns the mean loss over the step's rows on all ranks, so that all of them take
        the same branch of a line search. The first call finds the gradients that the loop has computed, unless the
        optimizer has moved the parameters before it.
        """
        computed_at: list[int] | None = _versions(model)

        def closure() -> Tensor:
            nonlocal computed_at
            if computed_at != _versions(model):
                self._compute_again(model, backward)
            computed_at = None
            if self._world.size > 1:
                dist.all_reduce(self._loss)
                self._loss /= self._world.size
            return self._loss.clone()

        return closure

    def _compute_again(self, model: nn.Module, backward: Callable[[Batch], Tensor]) -> None:
        self.again = True
        model.zero_grad()
        with torch.enable_grad():
            for batch in self._batches:
                backward(batch)
        self.again = False


def _versions(model: nn.Module) -> list[int]:
    """Returns a count of each parameter's changes in place."""
    return [parameter._version for parameter in model.parameters()]


class CarriedState:
    """The state of each micro-batch of this rank's step, detached: its rows continue those of the step before."""

    def __init__(self) -> None:
        self._epoch = -1
        self._of_micro: dict[int, Any] = {}

    def state_dict(self) -> StateDict:
        """Returns the state of all micro-batches, for a checkpoint."""
        return {"epoch": self._epoch, "of_micro": self._of_micro}

    def load_state_dict(self, state: Mapping[str, Any], device: str) -> None:
        """Takes the state of a checkpoint."""
        self._epoch = state["epoch"]
        self._of_micro = mapped_tensors(lambda tensor: tensor.to(device), dict(state["of_micro"]))

    def attach(self, batch: Batch) -> Batch:
        """Returns the batch with the state of its rows; None in the first step of an epoch, where no row continues."""
        if batch.micro_batch.epoch != self._epoch:
            self._epoch, self._of_micro = batch.micro_batch.epoch, {}
        return replace(batch, state=self._of_micro.get(batch.micro_batch.micro))

    def store(self, returned: Any, batch: Batch) -> Any:
        """Stores the state that forward returned for `batch`. Returns the output.

        A rank without rows keeps none: it computes other ranks' rows. Raises UserError where forward returned no pair.
        """
        output, state = output_and_state(returned)
        if batch.micro_batch.rows:
            self._of_micro[batch.micro_batch.micro] = detached(state)
        return output


def with_weights(batches: Iterator[Batch], job: Job, world: World) -> Iterator[Batch]:
    """Yields the batches with their weights and shares, as Job.batch_weight says of them.

    All micro-batches of a step are loaded first: a share is of the weights of all ranks, which are summed once a step.
    """
    step: list[Batch] = []
    for batch in batches:
        step.append(batch)
        if batch.completes_step:
            yield from _weighed_step(step, job, world)
            step = []


def _weighed_step(step: list[Batch], job: Job, world: World) -> Iterator[Batch]:
    # A rank without rows computes other ranks' rows, which weigh nothing here.
    weights = [batch_weight(job, batch) if batch.micro_batch.rows else 0.0 for batch in step]
    total = torch.tensor(sum(weights), dtype=torch.float64, device=world.device)
    if world.size > 1:
        if not dist.is_initialized():
            raise Refused(message("batch_weight_needs_a_process_group"))
        dist.all_reduce(total)
    total_weight = float(total)
    for batch, weight in zip(step, weights, strict=True):
        # Where nothing of a step weighs anything its gradient is zero, as it is in one process.
        share = weight * world.size / total_weight if total_weight else 0.0
        yield replace(batch, micro_batch=replace(batch.micro_batch, weight=weight, share=share))


def batch_weight(job: Job, batch: Batch) -> float:
    """Returns what a batch weighs. Raises UserError for a value that is no weight."""
    assert job.batch_weight
    returned = job.batch_weight(batch)
    try:
        weight = float(returned.detach() if isinstance(returned, Tensor) else returned)
    except (TypeError, ValueError, RuntimeError):
        form = f"Tensor of shape {list(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        raise UserError(message("batch_weight_is_no_number", form=form)) from None
    if not (math.isfinite(weight) and weight >= 0):
        raise UserError(message("batch_weight_is_no_weight", weight=weight, step=batch.micro_batch.step))
    return weight


class ForwardPass:
    """What forward passes need besides the model: the phases and the random generators; where the job asks, the
    state that is carried from step to step and the closure of the optimizer's step."""

    def __init__(self, job: Job, world: World) -> None:
        self.carried = CarriedState() if job.carry_state else None
        self.closure = Closure(world) if job.optimizer.needs_closure else None
        self._job, self._world = job, world
        self._of_phase = job.of_phases()
        self._phase: ActivePhase | None = None
        self._streams = [default_generator(device) for device in world.devices]

    def begin(self, micro_batch: MicroBatch, model: nn.Module | None) -> Job:
        """Activates the micro-batch's phase and seeds the generators. Returns the job of the phase."""
        if self._job.phases and model:
            self._phase = self._phase or ActivePhase(self._job.phases, model)
            self._phase.activate(micro_batch.phase)
        first = self._world.replica * len(self._streams)
        for replica, stream in enumerate(self._streams, first):
            stream.manual_seed(key(self._job.seed, "replica", micro_batch.step, micro_batch.micro, replica))
        return self._of_phase[micro_batch.phase]

    def end(self) -> None:
        """Lets go of the active phase."""
        if self._phase:
            self._phase.end()
            self._phase = None


def detached(state: Any) -> Any:
    """Returns a state whose tensors have no graph."""
    return mapped_tensors(Tensor.detach, state)


@dataclass(frozen=True)
class RankTensors:
    """The sizes of one rank's tensors, which all ranks learn before the tensors are sent.

    rows: the number of the rank's rows, and weight: their weight. structure: of its output and data, with the leaves'
    dtypes. shapes: of each leaf; None: not a tensor. by_row: whether a leaf's first dimension is the rank's rows.
    """

    rows: int
    weight: float
    structure: str
    shapes: list[tuple[int, ...] | None]
    by_row: list[bool]


def loss_over_all_rows(job: Job, output: Any, batch: Batch, schedule: Schedule, world: World) -> Tensor:
    """Computes the criterion once on the rows of all ranks. What it draws is the same on every rank.

    On each rank the loss has the graph of that rank's own rows: the sum of the ranks' gradients is that of one process.
    """
    alone = replace(schedule, world_size=1)
    (all_rows,) = alone.step(0, *alone.place_of(batch.micro_batch.step))
    gathered = gather_rows(output, batch, all_rows, world)
    torch.manual_seed(key(job.seed, "all rows", batch.micro_batch.step))
    return job.criterion(*gathered)


def gather_rows(output: Any, batch: Batch, all_rows: MicroBatch, world: World) -> tuple[Any, Batch]:
    """Returns the output and the batch of the whole step: the rows of all ranks in the order of the ranks.

    Tensors whose first dimension is the rank's rows are concatenated. Other floating-point tensors of the output, such
    as a learned temperature, become their mean over the ranks, by the weights of the ranks' rows. All else stays the
    rank's own. Only the rank's own part carries its graph, so that backward needs no collective: the gradients of all
    ranks add up to that of one process.
    whole: the part of a single process in this step. Every rank must call this, one without rows too, whose rows are
    left out. Raises Refused, on all ranks, where their tensors do not fit together.
    """
    micro_batch = batch.micro_batch
    leaves, rebuilt = flattened((output, batch.data))
    of_output = len(leaves_of(output))
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    rank_tensors = RankTensors(
        rows=micro_batch.rows,
        weight=micro_batch.weight,
        structure=f"{outline((output, batch.data))} {[None if t is None else t.dtype for t in tensors]}",
        shapes=[None if t is None else tuple(t.shape) for t in tensors],
        by_row=[t is not None and t.dim() > 0 and len(t) == len(micro_batch.indices) for t in tensors],
    )
    ranks: list[RankTensors] = gather_from_ranks(rank_tensors, world)
    by_row, averaged = list[bool](), list[bool]()
    if all(rank.structure == ranks[0].structure for rank in ranks):
        by_row = [all(rank.by_row[n] for rank in ranks if rank.rows) for n in range(len(leaves))]
        floating = [tensor is not None and tensor.is_floating_point() for tensor in tensors]
        averaged = [not by_row[n] and n < of_output and floating[n] for n in range(len(leaves))]
    _check_shapes(ranks, by_row, averaged, micro_batch.step)
    rank_leaves = [t[: micro_batch.rows] if t is not None and by_row[n] else t for n, t in enumerate(tensors)]
    sent = [n for n in range(len(leaves)) if by_row[n] or averaged[n]]
    shapes = [[(rank.rows, *_shape(rank, n)[1:]) if by_row[n] else _shape(rank, n) for n in sent] for rank in ranks]
    of_rank = _all_gather([_tensor(rank_leaves[n]) for n in sent], shapes, world)
    total = sum(rank.weight for rank in ranks)
    for position, n in enumerate(sent):
        parts = [pieces[position] for pieces in of_rank]
        parts[world.rank] = _tensor(rank_leaves[n])  # the same values, with their graph
        if by_row[n]:
            leaves[n] = torch.cat(parts)
        else:
            shares = [rank.weight / total for rank in ranks]
            leaves[n] = sum((p * share for p, share in zip(parts[1:], shares[1:])), parts[0] * shares[0])
    output, data = rebuilt(leaves)
    return output, Batch(data, all_rows)


def _shape(rank: RankTensors, number: int) -> tuple[int, ...]:
    shape = rank.shapes[number]
    assert shape is not None
    return shape


def _tensor(leaf: Tensor | None) -> Tensor:
    assert leaf is not None
    return leaf


def _check_shapes(ranks: list[RankTensors], by_row: list[bool], averaged: list[bool], step: int) -> None:
    """Raises Refused where the ranks' tensors cannot be put together: all ranks know the same, and raise the same."""
    for rank, compared in enumerate(ranks):
        if compared.structure != ranks[0].structure:
            raise Refused(message("gathered_outputs_have_different_structures", step=step, rank=rank))
        for number, together in enumerate(by_row):
            pair = [_shape(r, number)[1:] if together else r.shapes[number] for r in (ranks[0], compared)]
            if (together or averaged[number]) and pair[0] != pair[1]:
                shapes = [f"{list(_shape(of_rank, number))}" for of_rank in (ranks[0], compared)]
                raise Refused(
                    message(
                        "gathered_outputs_have_different_shapes",
                        step=step,
                        shape_on_rank_0=shapes[0],
                        rank=rank,
                        shape=shapes[1],
                    )
                )


def _all_gather(tensors: list[Tensor], shapes: list[list[tuple[int, ...]]], world: World) -> list[list[Tensor]]:
    """Returns every rank's tensors, without a graph. shapes: [rank][tensor]. All are sent at once, as bytes."""
    packed = torch.cat([bytes_of(t.detach().contiguous()) for t in tensors])
    sizes = [[t.element_size() * torch.Size(s).numel() for t, s in zip(tensors, of_rank)] for of_rank in shapes]
    most = max(map(sum, sizes))
    padded = packed.new_zeros(most)
    padded[: len(packed)] = packed
    received = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(received, padded)
    return [
        # cloned: a view as another dtype must begin at a multiple of its size
        [
            piece.clone().view(t.dtype).reshape(shape)
            for piece, t, shape in zip(flat[: sum(counts)].split(counts), tensors, of_shapes)
        ]
        for flat, counts, of_shapes in zip(received, sizes, shapes)
    ]


def is_one_row_error(error: BaseException) -> bool:
    """Returns whether torch raised `error` because a BatchNorm layer got a single row."""
    return "more than 1 value per channel" in str(error)


def one_row_message(step: int, replica: int, micro_batches: int = 1, fewest: int = 1) -> Message:
    """Returns the message for a BatchNorm layer that would get a single row. micro_batches: of a step; fewest: of
    these, those that the engine asks for."""
    if micro_batches == 1:
        return message("batch_norm_gets_one_row", step=step, rank=replica)
    fields = {"micro_batches": micro_batches, "setting": "--set-engine microbatches" if fewest > 1 else None}
    return message("batch_norm_gets_one_row_in_a_micro_batch", step=step, replica=replica, **fields)


def explain_ddp_error(error: BaseException, job: Job) -> Message | None:
    """Returns a message about parameters without a gradient in DistributedDataParallel; None for other errors."""
    if not is_unused_error(error):
        return None
    return unused_message(
        error, [name for name, parameter in job.model().named_parameters() if parameter.requires_grad]
    )


def explain_wrapped_model(error: BaseException, job: Job) -> Message | None:
    """Returns a message about an attribute of the job's model that Job.forward reads of an engine's wrapper, which has
    only its own; None for other errors."""
    found = re.search(r"'(\w+)' object has no attribute '(\w+)'", str(error))
    if not isinstance(error, AttributeError) or found is None:
        return None
    wrapper, name = found.groups()
    model = job.model()
    if type(model).__name__ == wrapper or not hasattr(model, name):
        return None
    return message("forward_reads_a_wrapped_model", wrapper=wrapper, attribute=name, model=type(model).__name__)


def explain_dtypes(error: BaseException, job: Job) -> Message | None:
    """Returns a message about parameters of several dtypes that FSDP was to shard together; None for other errors."""
    if "uniform original parameter dtype" not in str(error):
        return None
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in job.model().parameters()}
    return message("fsdp_shards_one_dtype_together", dtypes=sorted(dtypes))


def explain_strides(error: BaseException, job: Job) -> Message | None:
    """Returns a message about a parameter in another memory format, of which an engine takes no parts or bytes; None
    for other errors."""
    if not re.search("contiguous|stride", str(error)):
        return None
    name = next((name for name, parameter in job.model().named_parameters() if not parameter.is_contiguous()), None)
    return message("parameter_is_not_contiguous", parameter=name) if name else None


def is_unused_error(error: BaseException) -> bool:
    """Returns whether DistributedDataParallel raised `error` because parameters had no gradient."""
    return "finished reduction in the prior iteration" in str(error)


def unused_message(error: BaseException, names: Sequence[str]) -> Message:
    """Returns a message that names the parameters without a gradient, where DDP's message has their indices.

    names: of the trained parameters, in the order of DDP's module.
    """
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    numbers = [int(number) for number in found[1].split()] if found else []
    if not numbers or max(numbers) >= len(names):
        return message("some_parameters_have_no_gradient")
    return message("parameters_have_no_gradient", parameters=[names[number] for number in numbers])
