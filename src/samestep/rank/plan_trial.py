"""What plans of how ranks divide a model are tried on, in one process: a few rows, and when two values are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from samestep.data.loader import Rows, to_device
from samestep.data.schedule import schedule_of
from samestep.data.stream import is_stream
from samestep.errors import Refused, UserError
from samestep.job import Batch, Job, MicroBatch
from samestep.job.walk import leaves_of, mapped_tensors
from samestep.message import message
from samestep.rank.job_errors import raised_on_rows, raising

LOOKED_AT = 16  # rows, of which those that a plan is tried on are chosen
Result = TypeVar("Result")


def tried(job: Job, count: int, device: str, trial: Callable[[Batch], Result]) -> Result:
    """Returns what `trial` returns for `count` rows; for the rows of the job's first micro-batch where the job refuses
    so few. Raises UserError for what a function of the job's raises on both."""
    try:
        return trial(first_rows(job, count, device))
    except UserError as error:
        if not raised_on_rows(error.message) or _first_micro_batch(job).rows <= count:
            raise
    return trial(first_rows(job, job.global_batch, device))


def first_rows(job: Job, count: int, device: str) -> Batch:
    """Returns at most `count` rows of the job's first batches: the least and the most padded one before others."""
    first, rows = _first_micro_batch(job), Rows(job)
    count = min(count, first.rows)
    if 1 < count < LOOKED_AT and not is_stream(job.train):
        chosen = _with_rows(first, _unlike(job, rows, count))
        try:
            return Batch(to_device(rows[chosen][1], device), chosen)
        except Exception:  # rows of several batches, which a collate may not put together
            pass
    first = _with_rows(first, first.indices[:count])
    return Batch(to_device(raising("reading", lambda: rows[first][1], count), device), first)


def without_derivatives(call: Callable[..., Result], *arguments: Any) -> Result:
    """Returns what `call` returns for the arguments. Raises Refused where it computes a derivative itself, as of a
    gradient penalty: plans are tried without gradients."""
    try:
        return call(*arguments)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise Refused(message("plan_is_tried_without_derivatives")) from error


def fresh(batch: Batch) -> Batch:
    """Returns a batch with copies of its tensors, for a forward pass that may change these in place."""
    return replace(batch, data=mapped_tensors(Tensor.clone, batch.data))


def _first_micro_batch(job: Job) -> MicroBatch:
    return schedule_of(job, 1).step(0, 0, 0)[0]


def _with_rows(micro_batch: MicroBatch, indices: NDArray[np.int64]) -> MicroBatch:
    return replace(micro_batch, indices=indices, rows=len(indices), repeats=None)


def _unlike(job: Job, rows: Rows, count: int) -> NDArray[np.int64]:
    """Returns the indices of `count` rows, the least and the most padded one first."""
    lengths: dict[int, int] = {}
    for micro_batch in _micro_batches(job):
        indices = micro_batch.indices[: min(micro_batch.rows, LOOKED_AT)]
        try:
            data = rows[_with_rows(micro_batch, indices)][1]
        except Exception:  # which the training will raise
            break
        lengths |= zip(indices.tolist(), _lengths(data, len(indices)))
        if len(lengths) >= LOOKED_AT:
            break
    if len({*lengths.values()}) < 2:
        return _first_micro_batch(job).indices[:count]
    extremes = max(lengths, key=lambda index: lengths[index]), min(lengths, key=lambda index: lengths[index])
    return np.array([*dict.fromkeys([*extremes, *lengths])][:count], dtype=np.int64)


def _micro_batches(job: Job) -> Iterator[MicroBatch]:
    schedule = schedule_of(job, 1)
    for step in range(0, schedule.steps_per_epoch, schedule.phases):
        yield from (micro_batch for micro_batch in schedule.step(0, 0, step) if micro_batch.rows)


def _lengths(data: Any, rows: int) -> list[int]:
    """Returns how much of each row is not its end: values at its end that are alike, such as padding."""
    lengths = torch.zeros(rows, dtype=torch.int64)
    for leaf in leaves_of(data):
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and len(leaf) == rows and leaf[0].numel():
            values = leaf.flatten(1)
            lengths += values.shape[1] - (values == values[:, -1:]).flip(1).long().cumprod(1).sum(1)
    return lengths.tolist()


def with_random_weights(forward: Callable[[], Result], model: nn.Module, draw: Callable[[], None]) -> Result:
    """Calls `draw`, which gives a model random weights, and returns forward(). Of a model that does not take these, as
    one that decomposes a matrix, the weights are its own with a little of the random ones."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    weights = [parameter.detach().clone() for parameter in parameters]
    draw()
    try:
        return forward()
    except Exception:
        for parameter, weight in zip(parameters, weights):
            parameter.data.copy_(weight + 0.01 * parameter.data)
    return forward()


def draw_weights(model: nn.Module, seed: int) -> None:
    """Gives every parameter random values near those of a new layer: what is zero would hide how it is computed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
                if parameter.dim() > 1:
                    parameter.copy_(drawn / max(1, parameter.numel() / max(1, len(parameter))) ** 0.5)
                else:
                    parameter.add_(drawn / 4)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model that trains into evaluation mode while the block runs: its dropout draws nothing."""
    model.eval()
    try:
        with without_fast_path():
            yield
    finally:
        model.train()


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Lets transformer layers call in evaluations what they call in training while the block runs."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def memory_order(tensor: Tensor) -> list[int]:
    """Returns the dimensions of a tensor as they lie in memory, the outermost first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def laid_out(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Returns a tensor whose dimensions lie in memory in this order: dropout draws one value after the other as they
    lie there. order: as of memory_order()."""
    if memory_order(tensor) == [*order]:
        return tensor
    places = [order.index(dim) for dim in range(tensor.dim())]
    return tensor.permute(*order).contiguous().permute(*places)


class TakenTensors(TorchFunctionMode):
    """Calls note(operation, tensor) for each tensor that an operation takes, parameters and buffers among them."""

    def note(self, operation: Any, tensor: Tensor) -> None:
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.note(func, leaf)
        return func(*args, **(kwargs or {}))


def without_compiling() -> AbstractContextManager[Any]:
    """Lets compiled code run as it is written. What inspects a job has not imported dynamo, which takes a second, and
    compiles nothing."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_close(expected: Any, given: Any, *, tolerance: float) -> bool:
    """Returns whether two values are equal up to rounding. tolerance: a share of the largest finite magnitude."""
    if not (isinstance(expected, Tensor) and isinstance(given, Tensor)):
        return type(expected) is type(given)
    if expected.shape != given.shape:
        return False
    if not expected.is_floating_point():
        return bool((expected == given).all())
    finite = expected.detach()[expected.isfinite()].double()
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(expected.double(), given.double(), rtol=0.0, atol=tolerance * scale, equal_nan=True)
