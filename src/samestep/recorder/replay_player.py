"""Runs a recorded script again in one process: feeds it the batches that the ranks read, and compares weights."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samestep.rank.shards import block_of
from samestep.recorder.draws import joined_draws, patch_draws
from samestep.recorder.forwards import (
    CannotConcatenate,
    is_joined,
    joined,
    joined_outputs,
    moved_like,
    patch_training_forwards,
    random_states,
    set_random_states,
    split,
)
from samestep.recorder.loaders import rows_of
from samestep.recorder.not_replayed import CALLS, FOR_A_BATCH, IN_TURN, OTHER_DRAWS, OTHER_ROWS, OUTSIDE, UNFED
from samestep.recorder.patches import in_backward, patch_autograd
from samestep.recorder.recorder import Recorder
from samestep.recorder.replay_data import Forward, ReplayData, Weights, buffers, patch_loaders
from samestep.records.arrays import read_arrays
from samestep.records.replay import END, KEPT, START, Distance, Feed, Replayed, ReplayPlan

MOVES = 1e-4  # of the first gradient's root mean square: smaller elements are rounding, which Adam makes full steps of


class ReplayPlayer:
    """Feeds one process the batches of several. leave: ends the process with the result."""

    def __init__(self, recorder: Recorder, plan: ReplayPlan, leave: Callable[[Replayed], NoReturn]) -> None:
        self._recorder, self._plan, self._leave = recorder, plan, leave
        folder = Path(plan.record)
        self._kept = self._read(folder)
        self._start, self._end = (_weights(folder, name, self._kept) for name in (START, END))
        self._first: dict[str, Tensor] = {}  # the first gradients
        self._forwards = self._length_calls = 0
        self._events = self._drawn = 0  # forwards and backward passes that have begun; numbers drawn since the last
        self._read_since = self._inside = False
        self._loaded: set[str] = set()
        self._rates: list[list[Any]] = []
        self._base_rates: list[list[float]] = []
        kept = self._kept
        self._from_loader = bool(kept[0].passes)
        # A script that computes its loss of batches that it makes itself is not fed: it must make the ranks' batches.
        self._makes = not self._from_loader and not all(each.loss for each in kept[0].forwards)
        self._by_rank = not plan.in_turn and any(each.draws or each.batch_norm for each in kept)

    def _read(self, folder: Path) -> list[ReplayData]:
        """Reads what the ranks have kept. What the script itself defines is not known here, before it runs."""
        paths = [folder / KEPT.format(rank) for rank in range(self._plan.ranks)]
        try:
            return [torch.load(path, weights_only=False) for path in paths]
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            self._leave(Replayed(f"the kept batches hold objects of a class that only the script knows ({error})"))

    def why_not(self) -> str:
        """Returns why this record cannot be replayed; '' where it may be."""
        why = next((each.why_not for each in self._kept if each.why_not), "")
        if why:
            return why
        first = self._kept[0]
        if any(len(each.forwards) != len(first.forwards) for each in self._kept):
            return "the ranks had different numbers of forward passes"
        if any([len(b) for b in each.passes] != [len(b) for b in first.passes] for each in self._kept):
            return "the ranks have read different numbers of batches"
        if self._makes and self._by_rank:
            return UNFED
        if (self._from_loader or self._makes) and any(each.outside for each in self._kept):  # else the inputs are fed
            return OUTSIDE
        if self._from_loader and any(_counts(each) != _counts(first) for each in self._kept):
            return "the ranks draw different numbers of random numbers beside the model"
        if self._plan.in_turn and any(_counts(first)):
            return IN_TURN
        if self._plan.in_turn and first.several:
            return "a micro-batch has several forward passes, which cannot be played one rank at a time"
        return ""

    def attach(self) -> None:
        """Patches forwards and loaders; comes before the recorder's patches, so that it sees what is fed."""
        if why := self.why_not():
            self.stop(why)
        patch_training_forwards(self._forward)
        patch_loaders(self._next, self._length)
        patch_autograd(lambda _: None if in_backward() else self._end_draws(), lambda: None)
        if self._from_loader and not self._plan.in_turn:  # else the model's inputs are fed, or there are none
            patch_draws(self._draw)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def stop(self, why: str, needs_turns: bool = False) -> NoReturn:
        """Ends the replay: it cannot be judged."""
        self._leave(Replayed(why, self._feed, needs_turns))

    def result(self) -> Replayed:
        """Returns how far from the ranks' weights the replay has ended."""
        steps = self._recorder.steps
        if not steps:
            return Replayed("in one process the script takes no optimizer step", self._feed)
        means = self._by_rank and any(each.loss for each in self._kept[0].forwards)
        recorded = self._kept[0].base_rates
        micro = len(steps[0].micro)
        return Replayed("", self._feed, False, micro, self._distances(), self._base_rates, recorded, means)

    @property
    def _feed(self) -> Feed:
        return "in turn" if self._plan.in_turn else "by rank" if self._by_rank else "whole"

    def _distances(self) -> dict[str, Distance]:
        size = sum(each.numel() for each in self._first.values())
        squares = sum(float((each**2).sum()) for each in self._first.values())
        least = MOVES * (squares / size) ** 0.5 if size else 0.0
        distances = {}
        for name, gradient in self._first.items():
            moves = ~(gradient.abs() <= least)  # NaN, too
            start, end = self._start[name].double(), self._end[name].double()
            mine = block_of(self._recorder.parameters[name]).cpu().double()
            distances[name] = Distance(
                float(((end - start)[moves] ** 2).sum()), float(((mine - end)[moves] ** 2).sum())
            )
        return distances

    def _next(self, iterator: Any, read: Callable[[Any], Any]) -> Any:
        """Returns the ranks' batch instead of what the iterator would read."""
        first = self._kept[0]
        if iterator._samestep not in first.numbers:  # not one that is trained with
            self._inside = True
            try:
                return read(iterator)
            finally:
                self._inside = False
        of = first.numbers.index(iterator._samestep)
        at, ranks = getattr(iterator, "_samestep_read", 0), len(self._kept)
        iterator._samestep_read = at + 1
        rank, at = (at % ranks, at // ranks) if self._plan.in_turn else (0, at)
        if at >= len(first.passes[of]):
            if first.ended[of]:
                raise StopIteration
            more = not self._recorder.steps and not self._plan.in_turn
            self.stop("in one process the script reads more batches than a rank did", needs_turns=more)
        self._read_since, self._drawn = True, 0
        if self._plan.in_turn:
            return self._kept[rank].passes[of][at]
        return self._joined([each.passes[of][at] for each in self._kept])

    def _joined(self, parts: list[Any]) -> Any:
        try:
            return joined(parts)
        except CannotConcatenate as why:
            self.stop(str(why))

    def _length(self, loader: Any, length: int) -> int:
        self._length_calls += 1
        lengths = self._kept[0].lengths
        rank_length = lengths[self._length_calls - 1] if self._length_calls <= len(lengths) else length
        return rank_length * len(self._kept) if self._plan.in_turn else rank_length

    def _forward(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._end_draws()
        self._compare_calls(more_to_come=True)
        self._load(module)
        number, ranks = self._forwards, len(self._kept)
        self._forwards += 1
        rank, at = (number % ranks, number // ranks) if self._plan.in_turn else (0, number)
        if at >= len(self._kept[0].forwards):
            more = not self._recorder.steps and not self._plan.in_turn
            self.stop("in one process the script takes more forward passes than a rank did", needs_turns=more)
        of = [self._kept[rank]] if self._plan.in_turn else self._kept
        forwards = [each.forwards[at] for each in of]
        if self._makes:
            # Where it has drawn other random numbers than a rank, its targets may be others, too.
            if not _same(random_states(), forwards[0].randoms) or not is_joined(
                (args, kwargs), [each.inputs for each in forwards]
            ):
                self.stop(UNFED, needs_turns=not self._recorder.steps and not self._plan.in_turn)
        elif not self._from_loader:
            fed = self._joined([each.inputs for each in forwards])
            args, kwargs = moved_like(fed, (args, kwargs))
        else:
            rows, theirs = rows_of((args, kwargs)), [row for each in forwards for row in each.rows]
            if len(rows) != len(theirs) or (rows != theirs and not forwards[0].computed):
                self.stop(OTHER_ROWS)
        self._inside = True
        try:
            if self._by_rank:
                return self._call_by_rank(call, module, args, kwargs, forwards)
            set_random_states(forwards[0].randoms)
            return call(*args, **kwargs)
        finally:
            self._inside = False

    def _draw(self, call: Callable[[], Tensor]) -> Tensor:
        """Returns what the ranks together have drawn instead of what the script draws outside of the model."""
        numbers = call()
        of = [each.drawn[self._events] for each in self._kept if self._events < len(each.drawn)]
        if self._inside or not of or (of[0].after_read and not self._read_since):
            return numbers
        self._drawn += 1
        if self._drawn > len(of[0].values):  # after the last of the event: in no list
            return numbers
        value = joined_draws([each.values[self._drawn - 1] for each in of], numbers.shape)
        if value is None:
            self.stop(FOR_A_BATCH.format(tuple(numbers.shape)))
        with torch.no_grad():
            numbers.copy_(value)
        return numbers

    def _end_draws(self) -> None:
        """Ends the draws before a forward or a backward pass."""
        listed = self._kept[0].drawn
        wanted = len(listed[self._events].values) if self._events < len(listed) else 0
        if self._from_loader and not self._plan.in_turn and self._drawn < wanted:
            self.stop(OTHER_DRAWS)
        self._events, self._drawn, self._read_since = self._events + 1, 0, False

    def _call_by_rank(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, forwards: list[Forward]
    ) -> Any:
        """Calls a model with each rank's rows and random state, inside of one forward of its wrapper."""
        if hasattr(module, "_orig_mod"):
            self.stop("a compiled model with dropout or BatchNorm cannot be played rank by rank")
        inner = _unwrapped(module)
        before, forward = inner.__dict__.get("forward"), inner.forward
        sizes = [len(each.rows) for each in forwards]

        def by_rank(*args: Any, **kwargs: Any) -> Any:
            outputs = []
            for rank, of in enumerate(forwards):
                set_random_states(of.randoms)
                outputs.append(forward(*split(args, sizes, rank), **split(kwargs, sizes, rank)))
            return joined_outputs(outputs)

        inner.__dict__["forward"] = by_rank  # Fabric's wrapper would hand an attribute on
        try:
            return call(*args, **kwargs)
        finally:
            if inner.__dict__.get("forward") is by_rank:  # Lightning exchanges it during the call
                del inner.__dict__["forward"]
                if before is not None:
                    inner.__dict__["forward"] = before

    def _load(self, module: nn.Module) -> None:
        """Loads the recorded first weights into what is seen for the first time."""
        new = {name: p for name, p in self._recorder.parameters.items() if name not in self._loaded}
        if not new:
            return
        if missing := [name for name in new if name not in self._start or self._start[name].shape != new[name].shape]:
            self.stop(f"in one process the model has another parameter: {missing[0]}")
        self._loaded |= {*new}
        with torch.no_grad():
            for name, parameter in new.items():
                block_of(parameter).copy_(self._start[name])
            for name, buffer in buffers(module).items():
                if f"buffer {name}" in self._start:
                    buffer.copy_(self._start[f"buffer {name}"])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Takes the first gradients; steps at the recorded rates, as the replay's own are judged apart."""
        step = len(self._recorder.steps)
        self._first |= self._gradients()  # of several optimizers each steps for the first time
        groups = optimizer.param_groups
        momenta = self._kept[0].momenta
        if len({repr(each) for each in momenta.values()}) > 1 and len(momenta.get(step, ())) == len(groups):
            for group, moved in zip(groups, momenta[step]):  # by a schedule, which may depend on the ranks
                group.update(moved)
        self._rates.append([float(group["lr"]) for group in groups])
        if step < len(self._plan.rates) and len(self._plan.rates[step]) == len(groups):
            for group, rate in zip(groups, self._plan.rates[step]):
                _set_rate(group, rate)

    def _gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of parameters that have had none before."""
        named = [(name, p.grad) for name, p in self._recorder.parameters.items() if name not in self._first]
        return {name: block_of(gradient).cpu().double() for name, gradient in named if gradient is not None}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups, step = optimizer.param_groups, len(self._recorder.steps)
        for group, rate in zip(groups, self._rates.pop()):
            _set_rate(group, rate)
        if not self._recorder.counts():
            return
        self._first |= self._gradients()  # of a closure, which may also be the first to use the model
        if not self._rates:
            self._compare_calls()
            self._base_rates.append([float(group.get("initial_lr", group["lr"])) for group in groups])
            self._count_micro(step)

    def _compare_calls(self, more_to_come: bool = False) -> None:
        """Ends the replay where a closure is called another number of times: what follows would be fed otherwise."""
        step, calls = len(self._recorder.steps), self._recorder.window.calls
        wanted = self._plan.calls[step] if step < len(self._plan.calls) else calls
        if calls > wanted or (calls < wanted and not more_to_come):
            self.stop(CALLS.format(step, f"{calls} or more" if more_to_come else calls, wanted))

    def _count_micro(self, step: int) -> None:
        """Ends the replay where a step has other micro-batches than the ranks'."""
        micro, ranks = len(self._recorder.window.micro), len(self._kept)
        wanted = self._plan.micro[step] * (ranks if self._plan.in_turn else 1) if step < len(self._plan.micro) else 0
        if not wanted or micro == wanted:
            return
        turns = micro == self._plan.micro[step] * ranks and not self._plan.in_turn and not step
        each = self._plan.micro[step]
        why = f"one process takes {micro} micro-batches at step {step}, and each of {ranks} ranks {each}"
        why = UNFED if self._makes and micro == each else why  # it makes rank 0's batches alone
        self._leave(Replayed(why, self._feed, turns, micro if not step else -1))


def _counts(kept: ReplayData) -> list[int]:
    """Returns how many random numbers a rank has drawn before each forward and backward pass, beside the model."""
    return [len(each.values) for each in kept.drawn]


def _unwrapped(module: Any) -> Any:
    """Returns the module inside of DataParallel, DistributedDataParallel and Fabric's wrapper."""
    if isinstance(module, DataParallel | DistributedDataParallel):
        return _unwrapped(module.module)
    inside = module._modules.get("_forward_module")  # of Fabric
    return _unwrapped(inside) if inside is not None else module


def _weights(folder: Path, name: str, kept: list[ReplayData]) -> Weights:
    """Returns the whole weights: rank 0's, and of a sharded one the blocks of all ranks, put together."""
    of = [read_arrays(folder, rank, name) for rank in range(len(kept) if kept[0].shards else 1)]
    whole = {key: torch.from_numpy(array) for key, array in of[0].items()}
    for key, cut in kept[0].shards.items():
        whole[key] = torch.cat([torch.from_numpy(each[key]) for each in of if key in each], cut)
    return whole


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _set_rate(group: Any, rate: Any) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(float(rate))
    else:
        group["lr"] = rate
