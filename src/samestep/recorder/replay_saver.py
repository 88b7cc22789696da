"""Saves what a replay in one process needs: the batches that a rank reads, its random states, and rank 0's weights."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from samestep.job.foreign import attribute_of, is_a, named_buffers_in, parts_in
from samestep.message import Message, message
from samestep.rank.shards import is_shard
from samestep.recorder import sharding
from samestep.recorder.batches import Outputs, Packed, copied, holds_loss
from samestep.recorder.guards import recorder_guard
from samestep.recorder.loaders import patch_loaders, rows_of
from samestep.recorder.parameters import plain
from samestep.recorder.patches import in_backward, patch_autograd, patch_gathers, patch_training_forwards
from samestep.recorder.random_numbers import (
    Drawn,
    are_places,
    patch_draws,
    patch_numpy_draws,
    random_states,
    randomness,
    torch_state,
)
from samestep.recorder.recorder import Recorder
from samestep.records.script_plan import END, KEPT, START
from samestep.records.tensor_files import write_state
from samestep.records.torch_collectives import TO_ALL
from samestep.world import World
from samestep.world.regular_files import open_new

Weights = dict[str, Tensor]
MOMENTA = ("momentum", "betas")
SEEDING = [(torch, "manual_seed"), (torch, "set_rng_state"), (random, "seed"), (random, "setstate")]


@dataclass
class Forward:
    """One training forward of an outermost module."""

    rows: list[str]
    """Digests of the rows that the module received."""

    random_states: list[Tensor]
    """The states of torch's generators before the forward."""

    inputs: Packed | None = None
    """The inputs as (args, kwargs), where they are not the tensors of a loader's batch. None: they are."""

    loss: bool = False
    """Whether the output holds a loss."""

    computed: bool = False
    """Whether the inputs come from another model's output, so that one process has them only up to rounding."""

    after: str = ""
    """The digest of torch's random state at the end of the forward."""


@dataclass
class ReplayData:
    """What one rank saves for a replay."""

    passes: list[list[Packed]] = field(default_factory=list)
    """The batches of each pass over a loader that was trained with: [pass][batch]."""

    numbers: list[int] = field(default_factory=list)
    """The numbers of these passes among all passes over loaders."""

    ended: list[bool] = field(default_factory=list)
    """Whether each of these passes came to its end."""

    lengths: list[int | None] = field(default_factory=list)
    """The lengths of the loaders, in the order in which each is first asked for its length. None: the loader is read
    and not trained with, so that one process reads it by itself."""

    forwards: list[Forward] = field(default_factory=list)
    """The training forwards of outermost modules, in order."""

    base_rates: list[list[float]] = field(default_factory=list)
    """The rates from which a schedule starts: [step][parameter group]."""

    momenta: dict[int, list[dict[str, float | tuple[float, float]]]] = field(default_factory=dict)
    """Step -> the momentum of each parameter group, which some schedules change as well."""

    draws: bool = False
    """Whether random numbers are drawn inside a forward."""

    outside: bool = False
    """Whether some of the numbers of `drawn` are drawn otherwise than by functions that are patched."""

    batch_norm: bool = False
    """Whether a BatchNorm layer in training mode normalises this rank's rows by themselves."""

    exchanges: bool = False
    """Whether a forward exchanges tensors with other ranks, so that a rank's loss depends on the rows of others."""

    drawn: list[Drawn] = field(default_factory=list)
    """The random numbers drawn between a batch and the end of its loss, but not in the forward. One entry holds what
    was drawn before one forward or backward pass."""

    several: bool = False
    """Whether a micro-batch has several forwards."""

    places: dict[str, tuple[tuple[int, ...], list[Tensor]]] = field(default_factory=dict)
    """Sharded parameter -> its whole shape, and the indices along each dimension of this rank's block. The block is
    among this rank's weights."""

    why_not: Message | None = None
    """Why the training cannot be replayed. None: it can."""


class ReplaySaver:
    """Saves the training of one rank for a replay. To be attached before the recorder."""

    def __init__(self, recorder: Recorder, folder: Path, world: World) -> None:
        self._recorder, self._folder, self._world = recorder, folder, world
        self.data = ReplayData()
        self._batches: dict[int, list[Any]] = {}
        self._loaders_asked: list[object] = []  # for their lengths
        self._normalises_itself = False  # whether a BatchNorm has a forward of its own
        self._inputs: list[Any] = []  # of each forward
        self._start: Weights = {}
        self._randomness = ""  # the random state after the latest batch, forward or draw
        # unknown: whether there are draws by other functions than those that are patched
        self._drawn, self._unknown = Drawn(places_only=True), False
        self._inside = False  # whether a forward, or a loader, is running
        self._outputs, self._read_tensors = Outputs(), Outputs()
        self._micro_batch = (-1, -1)  # (step, number) of the latest forward

    def attach(self) -> None:
        """Patches forwards, backward(), and what reads from DataLoaders."""
        self._recorder.on_restart = self.forget
        hooks = self._recorder.hooks
        patch_training_forwards(hooks, self._forward)
        patch_loaders(hooks, self._read, self._length)
        patch_autograd(hooks, lambda _: None if in_backward() else self._end_draws(), lambda: None)
        patch_gathers(hooks, self._note_exchange, [collective.name for collective in TO_ALL])
        patch_draws(hooks, self._draw)
        patch_numpy_draws(hooks, self._draw)
        numpy = sys.modules.get("numpy")
        for owner, name in [*SEEDING, *((numpy.random, name) for name in ("seed", "set_state") if numpy)]:
            hooks.attach(owner, name, self._seed)
        register_optimizer_step_post_hook(recorder_guard.hook(self._after_step))
        self._recorder.before_engine_step = self._before_engine_step
        self._recorder.after_engine_step = self._after_engine_step

    def forget(self) -> None:
        """Forgets what was saved so far, which was no training of all ranks."""
        self.data = ReplayData(lengths=self.data.lengths)
        self._start, self._inputs, self._micro_batch = {}, [], (-1, -1)

    def write(self) -> None:
        """Writes what the replay needs into the folder."""
        passes = self._recorder.loaders.passes
        trained = [number for number, loader_pass in enumerate(passes) if loader_pass.trained]
        self._pack([self._batches.get(number, []) for number in trained])
        self.data.numbers = trained
        self.data.ended = [passes[number].ended for number in trained]
        self._forget_lengths_of_evaluations()
        # One that reduces in its forward pass normalises the rows of all ranks.
        self.data.batch_norm |= self._normalises_itself and not self._recorder.reduces_in_forward
        if trained and self.data.drawn and self.data.drawn[0].places_only:
            self.data.drawn[0] = Drawn()  # its loader has chosen the rows
        self._save()
        self._drop_copies()
        write_state(self._folder, self._world.rank, START, self._start)
        write_state(self._folder, self._world.rank, END, self._weights(self._recorder.parameters.by_name))

    def _forget_lengths_of_evaluations(self) -> None:
        loaders = self._recorder.loaders
        numbers, known = loaders.numbers(), {loader_pass.loader for loader_pass in loaders.passes}
        trained = {loader_pass.loader for loader_pass in loaders.passes if loader_pass.trained}
        for place, loader in enumerate(self._loaders_asked):
            if numbers.get(id(loader)) in known - trained:
                self.data.lengths[place] = None

    def _weights(self, named: Mapping[str, Tensor]) -> Weights:
        """Returns copies of what this rank alone may hold of tensors, on the CPU; rank 0's are the whole ones, too."""
        # The first forward pass shows whether each rank holds another part of a model that the script divides itself.
        every = self._world.rank == 0 or not self._recorder.steps or bool(self._recorder.group_operations)
        held = {name: t for name, t in named.items() if every or name in self.data.places}
        return {name: sharding.values_held(tensor).cpu().clone() for name, tensor in held.items()}

    def _drop_copies(self) -> None:
        """Drops the first weights where rank 0 keeps the same."""
        if self._world.rank and not self._recorder.group_operations:
            self._start = {name: tensor for name, tensor in self._start.items() if name in self.data.places}

    def _pack(self, passes: list[list[Any]]) -> None:
        try:
            self.data.passes = [[Packed(batch) for batch in batches] for batches in passes]
            for forward, inputs in zip(self.data.forwards, self._inputs):
                forward.inputs = None if inputs is None else Packed(inputs)
        except (AttributeError, TypeError, pickle.PicklingError) as error:  # what a batch holds is the script's
            why = message("batch_not_saved", kind=type(error).__name__, error=str(error))
            self.data = ReplayData(why_not=why)

    def _save(self) -> None:
        with open_new(self._folder / KEPT.format(self._world.rank)) as file:
            torch.save(self.data, file)

    def _read(self, iterator: Any, read: Callable[[Any], Any]) -> Any:
        outside, self._inside = self._inside, True  # the numbers that the loader draws itself, also where it ends
        try:
            data = read(iterator)
        finally:
            self._inside, self._randomness = outside, randomness()
        self._keep(iterator._samestep, data)
        self._read_tensors.add(data)
        self._drawn, self._unknown = Drawn(after_read=True), False
        return data

    def _keep(self, number: int, data: Any) -> None:
        if not self.data.why_not:
            try:
                self._batches.setdefault(number, []).append(self._copied(data))
            except Exception as error:  # what a batch holds is the script's
                self.data.why_not = message("batch_not_copied", kind=type(error).__name__, error=str(error))

    def _length(self, loader: Any, length: int) -> int:
        self.data.lengths.append(length)
        self._loaders_asked.append(loader)
        return length

    def _forward(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        recorder, data = self._recorder, self.data
        self._begin(module, args, kwargs)
        before = randomness()
        self._inside = True
        try:
            output = call(*args, **kwargs)
        finally:
            self._inside = False
        self._randomness = randomness()
        self._outputs.add(output)
        data.draws |= self._randomness != before
        data.forwards[-1].loss, data.forwards[-1].after = holds_loss(output), torch_state()
        micro_batch = len(recorder.steps), len(recorder.window.micro_batches)
        data.several |= micro_batch == self._micro_batch
        self._micro_batch = micro_batch
        return output

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        parameters = self._recorder.parameters.by_name
        self._end_draws()
        normalising = [part for part in parts_in(module) if normalises_rows_of_a_rank(part)]
        self.data.batch_norm |= not all(map(_computes_itself, normalising))
        self._normalises_itself |= any(map(_computes_itself, normalising))
        self.data.exchanges |= any(is_a(part, nn.SyncBatchNorm) for part in parts_in(module))
        self.data.why_not = self.data.why_not or self._why_not()
        new = {name: parameter for name, parameter in parameters.items() if name not in self._start}
        self._start |= self._weights(new)
        if new:
            self._start |= self._weights({f"buffer {n}": b for n, b in buffers(module).items() if not is_shard(b)})
        given = (args, kwargs)
        self._inputs.append(None if self._read_tensors.are_all_of(given) else self._copied(given))
        self.data.forwards.append(
            Forward(
                rows=rows_of(given),
                random_states=random_states(),
                computed=self._outputs.are_used_in(given),
            )
        )

    def _why_not(self) -> Message | None:
        """Returns why the model cannot be replayed; None where it can. Notes where the blocks of its parameters lie."""
        parameters = self._recorder.parameters
        for name, parameter in parameters.by_name.items():
            if place := sharding.place_in_whole(parameter):
                self.data.places[name] = place
        if parameters.flattened.parts or parameters.flattened.hides:
            return message("flattened_parameters_not_replayed")
        return None

    def _note_exchange(self, has_gradient: bool) -> None:
        self.data.exchanges |= self._inside and has_gradient

    def _draw(self, call: Callable[[], Tensor]) -> Tensor:
        """Keeps what the script draws outside of the model."""
        if self._inside:
            return call()
        if self._drawn.places_only:
            numbers = call()
            if are_places(numbers):
                self._drawn.keep(self._copied(numbers))
            return numbers
        self._unknown |= self._is_changed()
        numbers = call()
        self._drawn.keep(self._copied(numbers))
        self._randomness = randomness()
        return numbers

    def _seed(self, seed: Any, *args: Any, **kwargs: Any) -> Any:
        """Seeds a generator, which is no draw: one process seeds it, too."""
        is_outside = bool(self._randomness) and not self._inside
        self._unknown |= is_outside and self._is_changed()
        result = seed(*args, **kwargs)
        if is_outside:
            self._randomness = randomness()
        return result

    def _is_changed(self) -> bool:
        return bool(self._randomness) and self._randomness != randomness()

    def _end_draws(self) -> None:
        """Ends the draws before a forward or a backward pass."""
        if self.data.forwards or self._recorder.loaders.latest is not None:
            self.data.outside |= self._unknown or self._is_changed()
        self.data.drawn.append(self._drawn)
        self._drawn, self._unknown = Drawn(), False

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A step of an engine may be several of its optimizer.
        if self._recorder.parameters.are_known and not self._recorder.engine:
            self._drop_copies()
            self._note_settings(optimizer)

    def _note_settings(self, optimizer: Any) -> None:
        """Keeps the rates from which a schedule starts, and the momenta, of the step that goes on."""
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        self.data.base_rates.append(rates)
        momenta = [{key: group[key] for key in MOMENTA if key in group} for group in optimizer.param_groups]
        self.data.momenta[len(self._recorder.steps)] = momenta

    def _before_engine_step(self, optimizer: Any) -> None:
        # Its schedule is advanced within the step.
        self._note_settings(optimizer)

    def _after_engine_step(self, optimizer: Any, taken: bool) -> None:
        if taken:
            self._drop_copies()
        else:
            self.data.base_rates.pop()

    def _copied(self, data: Any) -> Any:
        return self._recorder.timed(copied)(data)


def buffers(module: nn.Module) -> Weights:
    return {plain(name): buffer for name, buffer in named_buffers_in(module)}


def normalises_rows_of_a_rank(module: nn.Module) -> bool:
    """Returns whether a module's output for one row depends on the other rows of the rank, and of no other rank."""
    kind = nn.modules.batchnorm._BatchNorm
    return attribute_of(module, "training") and is_a(module, kind) and not is_a(module, nn.SyncBatchNorm)


def _computes_itself(module: nn.Module) -> bool:
    """Returns whether a BatchNorm has a forward of its own, which may know the rows of other ranks."""
    return type(module).forward is not nn.modules.batchnorm._BatchNorm.forward
