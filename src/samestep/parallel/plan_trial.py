"""What plans of how ranks divide a model are tried on, in one process: a few rows, and when two values are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samestep.data.loader import Rows, to_device
from samestep.data.schedule import schedule_of
from samestep.data.stream import is_stream
from samestep.errors import Refused, UserError
from samestep.job import Batch, Job, MicroBatch
from samestep.job.walk import leaves_of, mapped_tensors
from samestep.message import message
from samestep.rank.job_errors import raised_on_rows, raising
from samestep.rank.step import default_generator, keep_state

LOOKED_AT = 16  # rows from which those are chosen that a plan is tried on
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


class Trial:
    """A job's model and a few rows, on which plans are tried. generator: draws the device's random numbers."""

    def __init__(self, job: Job, device: str, batch: Batch, *, seed: int, training: bool = True) -> None:
        self.model, self.device = job.model().to(device).train(training), device
        self.generator, self.restore = default_generator(device), keep_state(self.model)
        self._job, self._batch, self._seed = job.of_phases()[0], batch, seed

    def output_and_loss(self) -> tuple[Any, Tensor]:
        """Computes what the model returns and the loss, of the same rows with the same random numbers each time. Raises
        UserError for what the job's functions raise."""
        batch, rows = fresh(self._batch), self._batch.micro_batch.rows
        torch.manual_seed(self._seed)
        with without_compiling():
            output = raising("forward", lambda: _without_derivatives(self._job.output, self.model, batch), rows)
            return output, raising("criterion", lambda: _without_derivatives(self._job.criterion, output, batch), rows)

    def forward(self) -> tuple[Any, Tensor]:
        """Returns what output_and_loss() does, computes no gradients, and leaves the model as it was."""
        try:
            with torch.random.fork_rng(), torch.no_grad():
                return self.output_and_loss()
        finally:
            self.restore()


class Apart(UserError):
    """A rank of a divided model does not compute its part of the whole model's values. where: the layer or block in
    which; '': not known."""

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.where = where


def _without_derivatives(call: Callable[..., Result], *arguments: Any) -> Result:
    """Returns what `call` returns for the arguments. Raises Refused where it computes a derivative itself, as of a
    gradient penalty, and the plan is tried without gradients."""
    try:
        return call(*arguments)
    except RuntimeError as error:
        if torch.is_grad_enabled() or "does not require grad" not in str(error):
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
        except Exception:  # an error that the training will raise
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


def without_compiling() -> AbstractContextManager[Any]:
    """Lets compiled code run as it is written. What inspects a job has not imported dynamo, which takes a second, and
    compiles nothing."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_close(
    expected: Any, divided: Any, *, tolerance: float, ulps: float = 0, rounding: float = 0, finite: bool = False
) -> bool:
    """Returns whether a value of a divided trial is the whole model's.

    tolerance: a share of the largest finite magnitude. ulps: units in the last place of that, where these are more.
    rounding: an absolute difference that is none. finite: whether only finite values can be compared.
    """
    if not (isinstance(expected, Tensor) and isinstance(divided, Tensor)):
        return type(expected) is type(divided)
    if expected.shape != divided.shape:
        return False
    if not expected.is_floating_point():
        return bool((expected == divided).all())
    values = expected.detach().double()
    magnitudes = values[values.isfinite()].abs()
    if finite and magnitudes.numel() < values.numel():
        return False
    scale = float(magnitudes.max()) if magnitudes.numel() else 0.0
    within = max(max(tolerance, ulps * torch.finfo(expected.dtype).eps) * scale, rounding)
    return torch.allclose(values, divided.detach().double(), rtol=0.0, atol=within, equal_nan=True)


def rounding_of(gradients: Iterable[Tensor | None], share: float) -> float:
    """Returns `share` of the largest gradient. One that is zero but for rounding, as of a bias of attention's keys or
    before a normalisation, has no size of its own to compare with."""
    sizes = [float(g.detach().abs().max()) for g in gradients if g is not None and g.numel()]
    return share * max(sizes, default=0.0)
