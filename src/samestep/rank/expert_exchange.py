"""Experts that several ranks have some of each: rows go to the rank that has their expert, and the outputs come back.

A router's forward decides which rows each expert gets, and puts the outputs together. It stays as it is written, and is
computed twice: the first time its experts only note their rows, and return zeros; then two all-to-alls exchange rows
and outputs among the ranks; the second time the experts return these outputs. Random numbers and buffers are the same
both times. Gradients go the same way back, and an expert's is the sum over the ranks.
Source: https://arxiv.org/abs/2006.16668 (GShard)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.job.walk import mapped_tensors
from samestep.rank.step import default_generator

NOT_CALLED = -1  # in the place of a number of rows
Rows = Mapping[str, Tensor]  # the name of an expert -> its rows, shape [..., width]
Forwards = Mapping[str, Callable[[Tensor], Tensor]]  # the name of an expert -> its own forward
# Returns the experts' outputs, and a tensor whose backward pass every rank has to compute; None: there is none.
Compute = Callable[[Forwards, Rows], tuple[Rows, Tensor | None]]


def on_this_rank(forwards: Forwards, rows: Rows) -> tuple[Rows, None]:
    """Computes the experts' outputs."""
    return {name: forwards[name](given) for name, given in rows.items()}, None


class TwoPasses:
    """A router's module whose forward is computed twice. experts: by name. width: the last size of their outputs."""

    def __init__(self, router: nn.Module, experts: Mapping[str, nn.Module], *, width: int, compute: Compute) -> None:
        self._router, self._experts, self._width, self._compute = router, experts, width, compute
        self._forward = router.forward
        self._forwards: Forwards = {name: expert.forward for name, expert in experts.items()}
        self._rows: dict[str, Tensor] = {}
        self._outputs: Rows | None = None  # in the second pass

    def install(self) -> None:
        """Takes the place of the modules' forward."""
        self._router.forward = self.forward
        for name, expert in self._experts.items():
            expert.forward = partial(self._call, name)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Takes the place of the modules' forward while the block runs."""
        self.install()
        try:
            yield
        finally:
            for module in (self._router, *self._experts.values()):
                del module.forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        generators = [default_generator(device) for device in {"cpu", *(str(p.device) for p in self._parameters())}]
        states = [generator.get_state() for generator in generators]
        self._outputs, used = self._compute(self._forwards, self.rows_of(*arguments, **named))
        for generator, state in zip(generators, states):
            generator.set_state(state)
        try:
            output = self._forward(*arguments, **named)
        finally:
            self._outputs = None
        return output if used is None else mapped_tensors(partial(_with_backward_of, used), output)

    def rows_of(self, *arguments: Any, **named: Any) -> Rows:
        """Computes the first pass. Returns the rows that each called expert gets."""
        buffers = [(buffer, buffer.clone()) for buffer in self._router.buffers()]
        self._rows = {}
        self._forward(*arguments, **named)
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
        return self._rows

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for parameter in self._router.parameters() if not parameter.is_meta)

    def _call(self, name: str, rows: Tensor) -> Tensor:
        if self._outputs is not None:
            return self._outputs[name]
        self._rows[name] = rows
        return rows.new_zeros((*rows.shape[:-1], self._width))


class Exchange:
    """Exchanges rows and outputs among the ranks that divide a list of experts: a Compute.

    experts: by name, of which each rank has as many that follow each other. widths: the last sizes of their inputs and
    of their outputs. group: the ranks, in the order of the experts.
    """

    def __init__(
        self, experts: Mapping[str, nn.Module], widths: tuple[int, int], *, group: dist.ProcessGroup, device: str
    ) -> None:
        self.names, self.widths, self.group, self.device = [*experts], widths, group, device
        self.share = len(experts) // group.size()
        self.dtype = next(parameter.dtype for module in experts.values() for parameter in module.parameters())

    def __call__(self, forwards: Forwards, rows: Rows) -> tuple[Rows, Tensor]:
        called = [name for name in self.names if name in rows]
        flat = [rows[name].flatten(0, -2) for name in called]
        sizes = {name: len(part) for name, part in zip(called, flat)}
        counts = torch.empty(self.group.size(), len(self.names), dtype=torch.int64, device=self.device)
        mine = torch.tensor([[sizes.get(name, NOT_CALLED) for name in self.names]], device=self.device)
        dist.all_gather_into_tensor(counts, mine, group=self.group)
        nothing = torch.empty(0, self.widths[0], dtype=self.dtype, device=self.device)
        # Its gradient is nobody's: with it, the backward pass exchanges gradients on ranks that send no rows, too.
        anchor = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        given = torch.cat([*flat, nothing]), anchor, self, forwards, counts.tolist()
        returned: Tensor = _Exchanged.apply(*given)  # type: ignore[no-untyped-call]
        outputs = {}
        for name, part in zip(called, returned.split([*sizes.values()] or [0])):
            outputs[name] = part.view(*rows[name].shape[:-1], self.widths[1])
        return outputs, returned

    def send(self, rows: Tensor, counts: Sequence[Sequence[int]], *, width: int, back: bool = False) -> Tensor:
        """Sends rows to the ranks that have their experts, or outputs back to the ranks that have sent them.

        counts: of each rank, the rows for each expert. Returns what this rank receives, in the order of the ranks and
        of the experts.
        """
        place, ranks = self.group.rank(), range(self.group.size())

        def total(source: int, owner: int) -> int:
            return sum(max(0, count) for count in counts[source][owner * self.share :][: self.share])

        to_experts, from_ranks = [total(place, rank) for rank in ranks], [total(rank, place) for rank in ranks]
        sent, received = (from_ranks, to_experts) if back else (to_experts, from_ranks)
        result = rows.new_empty(sum(received), width)
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result

    def compute(self, forwards: Forwards, received: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Computes this rank's experts, each once for the rows of all ranks. Returns the outputs in their order."""
        first = self.group.rank() * self.share
        mine = [list(row[first : first + self.share]) for row in counts]  # [rank][expert]
        ends = [*accumulate(max(0, count) for row in mine for count in row)]
        pieces = torch.tensor_split(received, ends[:-1])  # of each rank, of each expert
        outputs: list[list[Tensor]] = [[] for _ in mine]
        for expert in range(self.share):
            if all(row[expert] == NOT_CALLED for row in mine):
                continue
            together = forwards[self.names[first + expert]](torch.cat(pieces[expert :: self.share]))
            for rank, part in enumerate(together.split([max(0, row[expert]) for row in mine])):
                outputs[rank].append(part)
        return torch.cat([received.new_empty(0, self.widths[1]), *(part for parts in outputs for part in parts)])


class _Exchanged(torch.autograd.Function):
    """Sends rows, computes this rank's experts, and sends the outputs back; and backward with the gradients."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, anchor: Tensor, exchange: Exchange, forwards: Forwards, counts: list[list[int]]
    ) -> Tensor:
        received = exchange.send(sent, counts, width=exchange.widths[0])
        with torch.set_grad_enabled(anchor.requires_grad):
            received.requires_grad_(anchor.requires_grad)
            outputs = exchange.compute(forwards, received, counts)
        ctx.exchange, ctx.counts, ctx.computed = exchange, counts, (received, outputs)
        return exchange.send(outputs.detach(), counts, width=exchange.widths[1], back=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (received, outputs), exchange = ctx.computed, ctx.exchange
        ctx.computed = None
        of_outputs = exchange.send(gradient, ctx.counts, width=exchange.widths[1])
        if outputs.requires_grad:
            torch.autograd.backward(outputs, of_outputs)
        of_rows = torch.zeros_like(received) if received.grad is None else received.grad
        of_sent = exchange.send(of_rows, ctx.counts, width=exchange.widths[0], back=True)
        return of_sent, None, None, None, None


class _WithBackward(torch.autograd.Function):
    """A tensor whose backward pass is also that of another one, to which it gives zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.other = torch.zeros_like(other)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.other


def _with_backward_of(other: Tensor, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    result: Tensor = _WithBackward.apply(tensor, other)  # type: ignore[no-untyped-call]
    return result
