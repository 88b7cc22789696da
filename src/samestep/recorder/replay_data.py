"""Saves what a replay in one process needs: the batches that a rank reads, its random states, and rank 0's weights."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, dataloader

from samestep.rank.shards import block_of, is_shard
from samestep.recorder.draws import Drawn, patch_draws
from samestep.recorder.forwards import Outputs, copied, patch_training_forwards, random_states, randomness, scalars
from samestep.recorder.loaders import rows_of
from samestep.recorder.names import plain
from samestep.recorder.patches import in_backward, patch_autograd
from samestep.recorder.recorder import Recorder
from samestep.recorder.shards import dimension_of
from samestep.records.arrays import write_state
from samestep.records.replay import END, KEPT, START
from samestep.world import World

Weights = dict[str, Tensor]
MOMENTA = ("momentum", "betas")


@dataclass
class Forward:
    """One training forward of an outermost module. rows: digests of its rows. inputs: (args, kwargs), where no loader
    was read before it. loss: whether its output holds one. computed: whether its inputs come of another model's output,
    so that one process has them only up to rounding."""

    rows: list[str]
    randoms: list[Tensor]
    inputs: Any = None
    loss: bool = False
    computed: bool = False


@dataclass
class ReplayData:
    """What one rank saves. passes: of each pass over a loader that was trained with, the batches. numbers: of these
    passes, among all. ended: whether each came to its end. lengths: of the loaders, in the order in which each is first
    asked.

    draws: whether random numbers are drawn inside of a forward. drawn: those between a batch and the end of its loss,
    but not in the forward. outside: whether some of these are drawn otherwise than by torch's functions. base_rates: of
    each step, the rates from which a schedule starts. momenta: of each step, the momentum of each parameter group,
    which some schedules move as well. shards: the dimension in which each sharded parameter is cut; this rank's blocks
    are among its weights.
    """

    passes: list[list[Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    base_rates: list[list[float]] = field(default_factory=list)
    momenta: dict[int, list[dict[str, float | tuple[float, float]]]] = field(default_factory=dict)
    draws: bool = False
    outside: bool = False
    batch_norm: bool = False
    drawn: list[Drawn] = field(default_factory=list)
    several: bool = False  # forwards in a micro-batch
    shards: dict[str, int] = field(default_factory=dict)
    why_not: str = ""


class ReplaySaver:
    """Saves the training of one rank for a replay. To be attached before the recorder."""

    def __init__(self, recorder: Recorder, folder: Path, world: World) -> None:
        self._recorder, self._folder, self._world = recorder, folder, world
        self.kept = ReplayData()
        self._batches: dict[int, list[Any]] = {}
        self._start: Weights = {}
        self._before = ""  # the random state after the latest batch, forward or draw
        self._drawn, self._unknown = Drawn(), False  # unknown: whether there are draws by other functions than torch's
        self._inside = False  # of a model's forward, or of a loader
        self._outputs = Outputs()
        self._micro = (-1, -1)

    def attach(self) -> None:
        """Patches forwards, backward(), and what reads from DataLoaders."""
        patch_training_forwards(self._forward)
        patch_loaders(self._read, self._length)
        patch_autograd(lambda _: None if in_backward() else self._end_draws(), lambda: None)
        patch_draws(self._draw)
        register_optimizer_step_post_hook(self._after_step)

    def write(self) -> None:
        """Writes what the replay needs into the folder."""
        passes = self._recorder.loaders.passes
        trained = [number for number, each in enumerate(passes) if each.trained]
        self.kept.passes = [self._batches.get(number, []) for number in trained]
        self.kept.numbers = trained
        self.kept.ended = [passes[number].ended for number in trained]
        self._save()
        write_state(self._folder, self._world.rank, START, self._start)
        write_state(self._folder, self._world.rank, END, self._weights(self._recorder.parameters))

    def _weights(self, named: Mapping[str, Tensor]) -> Weights:
        """Returns copies of what this rank alone holds of tensors, on the CPU; rank 0's are the whole ones, too."""
        own = {name: each for name, each in named.items() if self._world.rank == 0 or name in self.kept.shards}
        return {name: block_of(each).cpu().clone() for name, each in own.items()}

    def _save(self) -> None:
        path = self._folder / KEPT.format(self._world.rank)
        try:
            torch.save(self.kept, path)
        except (AttributeError, TypeError, pickle.PicklingError) as error:  # what a batch holds is the script's
            torch.save(ReplayData(why_not=f"a batch cannot be kept in a file ({type(error).__name__}: {error})"), path)

    def _read(self, iterator: Any, read: Callable[[Any], Any]) -> Any:
        outside, self._inside = self._inside, True  # the loader's own draws, also where it finds its end
        try:
            data = read(iterator)
        finally:
            self._inside, self._before = outside, randomness()
        self._keep(iterator._samestep, data)
        self._drawn, self._unknown = Drawn(after_read=True), False
        return data

    def _keep(self, number: int, data: Any) -> None:
        if not self.kept.why_not:
            try:
                self._batches.setdefault(number, []).append(self._timed(copied)(data))
            except Exception as error:  # what a batch holds is the script's
                self.kept.why_not = f"a batch cannot be copied ({type(error).__name__}: {error})"

    def _length(self, loader: Any, length: int) -> int:
        self.kept.lengths.append(length)
        return length

    def _forward(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder, kept = self._recorder, self.kept
        self._begin(module, args, kwargs)
        before = randomness()
        self._inside = True
        try:
            output = call(*args, **kwargs)
        finally:
            self._inside = False
        self._before = randomness()
        self._outputs.add(output)
        kept.draws |= self._before != before
        kept.forwards[-1].loss = scalars(output)
        micro = len(recorder.steps), len(recorder.window.micro)
        kept.several |= micro == self._micro
        self._micro = micro
        return output

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        kept = self.kept
        fed = self._recorder.loaders.latest is not None
        self._end_draws()
        kept.batch_norm |= any(_is_batch_norm(each) for each in module.modules())
        if self._recorder.engine:
            kept.why_not = kept.why_not or "DeepSpeed's engine is not replayed yet"
        for name, parameter in self._recorder.parameters.items():
            if is_shard(parameter) and (cut := dimension_of(parameter, self._world.size)) is not None:
                kept.shards[name] = cut
            elif is_shard(parameter):
                kept.why_not = kept.why_not or f"{name} is not sharded over all ranks in one dimension"
        if self._recorder.flattened.parts or self._recorder.flattened.hides:
            kept.why_not = kept.why_not or "the parameters are flattened by FSDP's first version"
        new = {name: p for name, p in self._recorder.parameters.items() if name not in self._start}
        self._start |= self._weights(new)
        if new:
            self._start |= self._weights({f"buffer {n}": b for n, b in buffers(module).items() if not is_shard(b)})
        given = (args, kwargs)
        inputs = None if fed else self._timed(copied)(given)
        kept.forwards.append(
            Forward(rows_of(given), random_states(), inputs, computed=self._outputs.are_used_in(given))
        )

    def _draw(self, call: Callable[[], Tensor]) -> Tensor:
        """Keeps what the script draws outside of the model."""
        if self._inside or not self._before:
            return call()
        self._unknown |= self._is_changed()
        numbers = call()
        self._drawn.values.append(self._timed(copied)(numbers))
        self._before = randomness()
        return numbers

    def _is_changed(self) -> bool:
        return bool(self._before) and self._before != randomness()

    def _end_draws(self) -> None:
        """Ends the draws before a forward or a backward pass."""
        if self.kept.forwards or self._recorder.loaders.latest is not None:
            self.kept.outside |= self._unknown or self._is_changed()
        self.kept.drawn.append(self._drawn)
        self._drawn, self._unknown = Drawn(), False

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._recorder.counts():
            return
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.kept.base_rates.append(rates)
        momenta = [{key: group[key] for key in MOMENTA if key in group} for group in optimizer.param_groups]
        self.kept.momenta[len(self._recorder.steps)] = momenta

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._recorder.timed(function)


def buffers(module: nn.Module) -> Weights:
    return {plain(name): each for name, each in module.named_buffers()}


def _is_batch_norm(module: nn.Module) -> bool:
    """Whether a module's output for one row depends on the other rows of the rank, and of no other rank."""
    kind = nn.modules.batchnorm._BatchNorm
    return module.training and isinstance(module, kind) and not isinstance(module, nn.SyncBatchNorm)


def patch_loaders(read: Callable[[Any, Callable[[Any], Any]], Any], length: Callable[[Any, int], int]) -> None:
    """Calls read(iterator, the original) for each batch, and length(loader, its own) when it is first asked."""
    base: Any = dataloader._BaseDataLoaderIter
    following, size = base.__next__, DataLoader.__len__
    lengths: dict[int, tuple[int, object]] = {}  # with the loader, so that its id stays its own

    @functools.wraps(following)
    def new_next(self: Any) -> Any:
        return read(self, following)

    @functools.wraps(size)
    def new_len(self: Any) -> int:
        if id(self) not in lengths:
            lengths[id(self)] = length(self, size(self)), self
        return lengths[id(self)][0]

    base.__next__ = new_next
    DataLoader.__len__ = new_len  # type: ignore[method-assign]
