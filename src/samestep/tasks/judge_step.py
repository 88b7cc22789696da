"""Judges one step of a training by its replay: the ranks' rows, losses, gradients and weights, in the order in which a
mistake would spread. The first in which any rank differs is named, with all ranks that differ in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isclose
from typing import Any

import torch
from torch import Tensor

from samestep.bounds import ABOVE_ZERO, ABOVE_ZERO_FLOAT32, FLOOR_ULPS, RATE_APART, TIMES_NOISE
from samestep.errors import UserError
from samestep.message import Message, message
from samestep.rank.digests import bits_digest
from samestep.reference import StepAfter, StepBefore


@dataclass(frozen=True)
class RankAfter:
    """What one rank saw of a step, and has after it."""

    indices: list[list[int]]
    """The indices of the rows of each micro-batch."""

    digests: list[list[str]]
    """The digests of the tensors of each micro-batch."""

    losses: list[Tensor]
    """The loss of each micro-batch."""

    gradients: Mapping[str, Tensor]
    """Name of a parameter -> the rank's own gradient before any reduction, of the losses times `scale`."""

    weights: Mapping[str, tuple[Tensor, list[int]]]
    """Name of a parameter -> (the rank's block after the step, the index in the whole tensor at which it begins)."""

    buffers: Mapping[str, Tensor]
    """Name of a buffer -> its value after the step."""

    scale: float = 1.0
    """The factor of a gradient scaler."""


@dataclass(frozen=True)
class TrainedStep:
    """One step as the ranks took it. copies: of each rank but the first, the weights before it that are no shards.

    optimizer: parameter -> key -> state after it. averages: of the weights, after it.
    """

    before: StepBefore
    copies: list[Mapping[str, Tensor]]
    ranks: list[RankAfter]
    optimizer: Mapping[str, Mapping[str, Any]]
    averages: Mapping[str, Tensor]


@dataclass(frozen=True)
class Finding:
    """The first thing in which a step differs from its replay. exact: no rounding explains it, however large."""

    found: Message
    ranks: list[int]
    exact: bool = False


@dataclass(frozen=True)
class Compared:
    """A tensor as a rank has it, and how to find it in a replay."""

    rank: int
    name: str
    found: Tensor
    of_replay: Callable[[StepAfter], Tensor]

    @staticmethod
    def of(rank: int, name: str, found: Tensor, of_replay: Callable[[StepAfter], Tensor]) -> Compared:
        """Returns one on the CPU, whose complex numbers are pairs of real ones."""

        def plain(tensor: Tensor) -> Tensor:
            tensor = tensor.detach().cpu()
            return torch.view_as_real(tensor) if tensor.is_complex() else tensor

        return Compared(rank, name, plain(found), lambda replay: plain(of_replay(replay)))


class StepJudge:
    """Compares a step with its replay. noisy: replays with noise of the size of rounding, made when they are needed."""

    def __init__(
        self,
        step: TrainedStep,
        replay: StepAfter,
        noisy: Callable[[], Sequence[StepAfter]],
        rates: Sequence[float] | None,
    ) -> None:
        self.step, self.replay, self._noisy, self.rates = step, replay, noisy, rates
        self.largest = 0.0
        self.bitwise = True

    @cached_property
    def noisy(self) -> Sequence[StepAfter]:
        return self._noisy()

    def finding(self) -> Finding | None:
        """Returns the first thing that differs; None where all are the same within rounding."""
        stages = (self._copies, self._rows, self._losses, self._gradients, self._rates, self._weights, self._state)
        return next((found for stage in stages if (found := stage())), None)

    def _copies(self) -> Finding | None:
        first = self.step.before.weights
        for name in first:
            if any(name in moved for moved in self.replay.moved):
                continue
            digests = [int(bits_digest(first[name]))]
            digests += [int(bits_digest(copy[name])) if name in copy else digests[0] for copy in self.step.copies]
            common = max(digests, key=digests.count)
            odd = [rank for rank, digest in enumerate(digests) if digest != common]
            if odd:
                odd = odd if len(digests) > 2 else [0, 1]  # of two it cannot be told which has been moved
                return self._found("spot_check_copies_differ", odd, exact=True, parameter=name)
        return None

    def _rows(self) -> Finding | None:
        pairs = list(enumerate(zip(self.step.ranks, self.replay.micro_batches)))
        odd = [
            rank for rank, (recorded, played) in pairs if recorded.indices != [list(part.indices) for part in played]
        ]
        if odd:
            return self._found("spot_check_rows_differ", odd, exact=True)
        odd = [rank for rank, (recorded, played) in pairs if recorded.digests != [part.digests for part in played]]
        return self._found("spot_check_data_differ", odd, exact=True) if odd else None

    def _rates(self) -> Finding | None:
        found = [float(group["lr"]) for group in self.step.before.groups if "lr" in group]
        for expected, rate in zip(self.rates or (), found):
            if not isclose(rate, expected, rel_tol=RATE_APART, abs_tol=ABOVE_ZERO_FLOAT32):
                values = {"found": rate, "expected": expected}
                return self._found("spot_check_rate_differs", self._all_ranks, exact=True, **values)
        return None

    def _losses(self) -> Finding | None:
        def of_replay(rank: int, micro: int) -> Callable[[StepAfter], Tensor]:
            return lambda replay: torch.tensor(replay.micro_batches[rank][micro].loss, dtype=torch.float64)

        return self._first(
            "spot_check_loss_differs",
            (
                Compared.of(number, "", loss, of_replay(number, micro))
                for number, rank in enumerate(self.step.ranks)
                for micro, loss in enumerate(rank.losses)
                if rank.indices[micro]
            ),
        )

    def _gradients(self) -> Finding | None:
        def of_replay(rank: int, name: str) -> Callable[[StepAfter], Tensor]:
            return lambda replay: replay.own_gradients[rank].get(name, torch.zeros(()))

        observed = enumerate(self.step.ranks[: len(self.replay.own_gradients)])
        return self._first(
            "spot_check_gradient_differs",
            (
                Compared.of(number, name, rank.gradients[name] / rank.scale, of_replay(number, name))
                for number, rank in observed
                for name in self.step.before.weights
                if name in rank.gradients
            ),
            bits=True,
        )

    def _weights(self) -> Finding | None:
        def of_replay(rank: int, name: str, offset: list[int], shape: torch.Size) -> Callable[[StepAfter], Tensor]:
            block = tuple(slice(start, start + size) for start, size in zip(offset, shape))
            return lambda replay: replay.moved[rank].get(name, replay.weights[name])[block]

        finding = self._first(
            "spot_check_weights_differ",
            (
                Compared.of(number, name, block, of_replay(number, name, offset, block.shape))
                for number, rank in enumerate(self.step.ranks)
                for name, (block, offset) in rank.weights.items()
                if block.numel()
            ),
            bits=True,
        )
        if finding and finding.ranks == self._all_ranks:
            return replace(finding, found=Message("spot_check_update_differs", finding.found.fields))
        return finding

    def _state(self) -> Finding | None:
        """Compares what a step leaves besides the weights: buffers, the optimizer's state, averages."""

        def buffer_of(rank: int, name: str) -> Callable[[StepAfter], Tensor]:
            return lambda replay: replay.buffers[rank][name]

        def state_of(name: str, key: str) -> Callable[[StepAfter], Tensor]:
            return lambda replay: replay.optimizer[name][key]

        def average_of(name: str) -> Callable[[StepAfter], Tensor]:
            return lambda replay: replay.averages[name]

        buffers = (
            Compared.of(number, name, buffer, buffer_of(number, name))
            for number, rank in enumerate(self.step.ranks)
            for name, buffer in rank.buffers.items()
        )
        optimizer = (
            Compared.of(0, f"{key} of {name}", value, state_of(name, key))
            for name, values in self.step.optimizer.items()
            for key, value in values.items()
            if isinstance(value, Tensor) and isinstance(self.replay.optimizer.get(name, {}).get(key), Tensor)
        )
        averages = (Compared.of(0, name, average, average_of(name)) for name, average in self.step.averages.items())
        return (
            self._first("spot_check_buffer_differs", buffers)
            or self._first("spot_check_optimizer_differs", optimizer)
            or self._first("spot_check_average_differs", averages)
        )

    @property
    def _all_ranks(self) -> list[int]:
        return list(range(len(self.step.ranks)))

    def _found(self, id: str, ranks: list[int], *, exact: bool = False, **fields: Any) -> Finding:
        return Finding(Message(id, {"step": self.step.before.step, "ranks": ranks, **fields}), ranks, exact)

    def _first(self, id: str, compared: Iterator[Compared], *, bits: bool = False) -> Finding | None:
        """Returns a finding about the first tensor that differs, with all ranks on which any does."""
        outside = []
        for pair in compared:
            expected = pair.of_replay(self.replay)
            if bits and self.bitwise:
                self.bitwise = torch.equal(pair.found.to(expected.dtype), expected.expand_as(pair.found))
            if self._is_outside(pair, expected):
                outside.append((pair, expected))
        if not outside:
            return None
        pair, expected = outside[0]
        distance = _distances(pair.found, expected)
        worst = int(distance.argmax()) if distance.numel() else 0
        value = expected.expand_as(pair.found).reshape(-1)[worst]
        names = {pair.name for pair, _ in outside}
        return self._found(
            id,
            sorted({pair.rank for pair, _ in outside}),
            name=pair.name or None,
            differing=len(names),
            found=float(pair.found.reshape(-1)[worst]),
            expected=float(value),
        )

    def _is_outside(self, pair: Compared, expected: Tensor) -> bool:
        if not pair.found.is_floating_point():
            return not torch.equal(pair.found, expected)
        if bool((pair.found.isfinite() & ~expected.expand_as(pair.found).isfinite()).any()):
            raise UserError(message("replay_overflows"))  # it adds gradients up before it divides
        distance = float(_distances(pair.found, expected).max())
        dtype = pair.found.dtype if expected.dtype == torch.float64 and not expected.dim() else expected.dtype
        largest = max(_largest(expected), ABOVE_ZERO)
        floor = FLOOR_ULPS * torch.finfo(dtype).eps * largest
        if distance <= floor:
            return False
        spread = max(float(_distances(pair.of_replay(noisy), expected).max()) for noisy in self.noisy)
        bound = max(floor, TIMES_NOISE * spread)
        self.largest = max(self.largest, distance / bound if bound else 0.0)
        return not distance <= bound


def _distances(found: Tensor, expected: Tensor) -> Tensor:
    """Returns how far each value is from the expected one: 0 where both are the same infinity, or are no number; inf
    where one alone is."""
    if not found.numel():
        return torch.zeros(1, dtype=torch.float64)
    found, expected = found.double().reshape(-1), expected.double().expand_as(found).reshape(-1)
    distance = (found - expected).abs()
    same = (found == expected) | (found.isnan() & expected.isnan())
    return torch.where(same, torch.zeros_like(distance), distance.nan_to_num(torch.inf))


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
