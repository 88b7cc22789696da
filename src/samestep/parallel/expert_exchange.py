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
from torch.autograd.function import once_differentiable

from samestep.job.walk import mapped_tensors
from samestep.rank.step import default_generator, keep_state

NOT_CALLED = -1  # in the place of a number of rows
Rows = Mapping[str, Tensor]  # the name of an expert -> its rows, shape [..., width]
Forwards = Mapping[str, Callable[[Tensor], Tensor]]  # the name of an expert -> its own forward


class Exchange:
    """Exchanges rows and outputs among the ranks that divide a list of experts.

    experts: by name, of which each rank has as many that follow each other. widths: the last sizes of their inputs and
    of their outputs. group: the ranks, in the order of the experts; None: this rank has them all.
    """

    def __init__(
        self, experts: Mapping[str, nn.Module], widths: tuple[int, int], *, group: dist.ProcessGroup | None, device: str
    ) -> None:
        self.names, self.widths, self.group, self.device = [*experts], widths, group, device
        self.place, self.size = (group.rank(), group.size()) if group else (0, 1)
        self.share = len(experts) // self.size
        owned = self.names[self.place * self.share :][: self.share]
        self.parameters = [parameter for name in owned for parameter in experts[name].parameters()]
        self.dtype = next(parameter.dtype for module in experts.values() for parameter in module.parameters())

    def __call__(self, forwards: Forwards, rows: Rows) -> tuple[Rows, Tensor]:
        """Returns the outputs of the experts that are called, and a tensor whose backward pass every rank has to
        compute."""
        called = [name for name in self.names if name in rows]
        flat = [rows[name].flatten(0, -2) for name in called]
        sizes = {name: len(part) for name, part in zip(called, flat)}
        counts = torch.empty(self.size, len(self.names), dtype=torch.int64, device=self.device)
        own_counts = torch.tensor([[sizes.get(name, NOT_CALLED) for name in self.names]], device=self.device)
        if self.group:
            dist.all_gather_into_tensor(counts, own_counts, group=self.group)
        else:
            counts.copy_(own_counts)
        nothing = torch.empty(0, self.widths[0], dtype=self.dtype, device=self.device)
        # No rank needs its gradient: it makes the backward pass exchange gradients on ranks that send no rows, too.
        anchor = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        given = self, forwards, counts.tolist(), torch.cat([*flat, nothing]), anchor
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        returned: Tensor = _Exchanged.apply(*given, *parameters)  # type: ignore[no-untyped-call]
        outputs = {}
        for name, part in zip(called, returned.split([*sizes.values()] or [0])):
            # Cloned: a router may change an output in place, which autograd allows of no part of a tensor.
            outputs[name] = part.view(*rows[name].shape[:-1], self.widths[1]).clone()
        return outputs, returned

    def send(self, rows: Tensor, counts: Sequence[Sequence[int]], *, width: int, back: bool = False) -> Tensor:
        """Sends rows to the ranks that have their experts, or outputs back to the ranks that have sent them.

        counts: of each rank, the rows for each expert. Returns what this rank receives, in the order of the ranks and
        of the experts.
        """
        if not self.group:
            return rows.clone()
        place, ranks = self.place, range(self.size)

        def total(source: int, owner: int) -> int:
            return sum(max(0, count) for count in counts[source][owner * self.share :][: self.share])

        to_experts, from_ranks = [total(place, rank) for rank in ranks], [total(rank, place) for rank in ranks]
        sent, received = (from_ranks, to_experts) if back else (to_experts, from_ranks)
        result = rows.new_empty(sum(received), width)
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result

    def compute(self, forwards: Forwards, received: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Computes this rank's experts, each once for the rows of all ranks. Returns the outputs in their order."""
        first = self.place * self.share
        own_counts = [list(row[first : first + self.share]) for row in counts]  # [rank][expert]
        ends = [*accumulate(max(0, count) for row in own_counts for count in row)]
        pieces = torch.tensor_split(received, ends[:-1])  # of each rank, of each expert
        outputs: list[list[Tensor]] = [[] for _ in own_counts]
        for expert in range(self.share):
            if all(row[expert] == NOT_CALLED for row in own_counts):
                continue
            together = forwards[self.names[first + expert]](torch.cat(pieces[expert :: self.share]))
            for rank, part in enumerate(together.split([max(0, row[expert]) for row in own_counts])):
                outputs[rank].append(part)
        return torch.cat([received.new_empty(0, self.widths[1]), *(part for parts in outputs for part in parts)])


class TwoPasses:
    """A router's module whose forward is computed twice. experts: by name, those of the exchange."""

    def __init__(self, router: nn.Module, experts: Mapping[str, nn.Module], exchange: Exchange) -> None:
        self._router, self._experts, self._exchange = router, experts, exchange
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
        modules = (self._router, *self._experts.values())
        before = [vars(module).get("forward") for module in modules]
        self.install()
        try:
            yield
        finally:
            for module, forward in zip(modules, before):
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        generators = [default_generator(device) for device in {"cpu", self._exchange.device}]
        states = [generator.get_state() for generator in generators]
        self._outputs, used = self._exchange(self._forwards, self.rows_of(*arguments, **named))
        for generator, state in zip(generators, states):
            generator.set_state(state)
        try:
            output = self._forward(*arguments, **named)
        finally:
            self._outputs = None
        return mapped_tensors(partial(_with_backward_of, used), output)

    def rows_of(self, *arguments: Any, **named: Any) -> Rows:
        """Computes the first pass. Returns the rows that each called expert gets."""
        restore, self._rows = keep_state(self._router), {}
        self._forward(*arguments, **named)
        restore()
        return self._rows

    def _call(self, name: str, rows: Tensor) -> Tensor:
        if self._outputs is not None:
            return self._outputs[name]
        self._rows[name] = rows
        return rows.new_zeros((*rows.shape[:-1], self._exchange.widths[1]))


class _Exchanged(torch.autograd.Function):
    """Sends rows, computes this rank's experts, and sends the outputs back; and backward with the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        forwards: Forwards,
        counts: list[list[int]],
        sent: Tensor,
        anchor: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        received = exchange.send(sent, counts, width=exchange.widths[0])
        with torch.set_grad_enabled(anchor.requires_grad):
            received.requires_grad_(anchor.requires_grad)
            outputs = exchange.compute(forwards, received, counts)
        ctx.exchange, ctx.counts, ctx.computed = exchange, counts, (outputs, [received, *parameters])
        return exchange.send(outputs.detach(), counts, width=exchange.widths[1], back=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (outputs, inputs), exchange = ctx.computed, ctx.exchange
        of_outputs = exchange.send(gradient, ctx.counts, width=exchange.widths[1])
        gradients: Sequence[Tensor | None] = [None] * len(inputs)
        if outputs.requires_grad:
            # retain_graph: it lives as long as this node, whose own graph may be retained.
            gradients = torch.autograd.grad(outputs, inputs, of_outputs, retain_graph=True, allow_unused=True)
        of_rows = torch.zeros_like(inputs[0]) if gradients[0] is None else gradients[0]
        of_sent = exchange.send(of_rows, ctx.counts, width=exchange.widths[0], back=True)
        return None, None, None, of_sent, None, *gradients[1:]


class _WithBackward(torch.autograd.Function):
    """A tensor whose backward pass is also that of another one, to which it gives zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, source: Tensor) -> Tensor:
        ctx.zeros = torch.zeros_like(source)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.zeros


def _with_backward_of(source: Tensor, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    result: Tensor = _WithBackward.apply(tensor, source)  # type: ignore[no-untyped-call]
    return result
