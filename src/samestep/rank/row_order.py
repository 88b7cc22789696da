"""The order in which ranks have the rows of a layer that computes several outputs at once, as query, key and value.

Each rank has its heads' rows of each output, so that its part is several pieces of the weight. The weight's rows are
put in the order of the ranks before it is split, and back where a whole tensor, or a piece of one, leaves the ranks:
state dicts and checkpoints have the order of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from samestep.job.phases import CHECKPOINTED

BY_RANK = "outputs_by_rank"  # the attribute of such a layer: (how many outputs it computes, how many ranks)
Value = TypeVar("Value")


class Rows(NamedTuple):
    """Rows of a block that follow one another in the whole tensor, too: the first one in each, and how many."""

    in_block: int
    in_whole: int
    number: int


def order_of_ranks(size: int, outputs: int, ranks: int) -> Tensor:
    """Returns the rows of `size`, of `outputs` outputs of one size, as ranks have them: all of rank 0 first."""
    return torch.arange(size).view(outputs, ranks, -1).transpose(0, 1).reshape(-1)


def order_rows(layer: Any, outputs: int, ranks: int) -> None:
    """Puts a layer's rows in the order of the ranks."""
    order = order_of_ranks(layer.out_features, outputs, ranks)
    for parameter in layer.parameters(recurse=False):
        parameter.data = parameter.data[order.to(parameter.device)]
    setattr(layer, BY_RANK, (outputs, ranks))


def row_orders(model: nn.Module) -> dict[str, Tensor]:
    """Returns the name of each parameter whose rows are in the order of the ranks -> the row of the whole tensor that
    is in each place."""
    orders: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and hasattr(layer, BY_RANK):
            order = order_of_ranks(layer.out_features, *getattr(layer, BY_RANK))
            prefix = f"{path}." if path else ""
            orders |= {f"{prefix}{name}".replace(CHECKPOINTED, ""): order for name in layer._parameters}
    return orders


def in_order_of_model(model: nn.Module, state: Mapping[str, Value]) -> dict[str, Value]:
    """Returns a state dict of whole tensors with their rows as the model has them."""
    orders, ordered = row_orders(model), dict[str, Any](state)
    for name, tensor in state.items():
        order = orders.get(name.replace(CHECKPOINTED, ""))
        if order is not None and isinstance(tensor, Tensor):
            ordered[name] = tensor[order.argsort().to(tensor.device)]
    return ordered


def pieces_of_block(order: Tensor | None, shape: Sequence[int], offset: Sequence[int]) -> Iterator[Rows]:
    """Yields the rows of a block that follow one another in the whole tensor. shape, offset: of the block, in a tensor
    whose rows are in this order; None: in that of the model."""
    if order is None or not shape:
        yield Rows(0, offset[0] if offset else 0, shape[0] if shape else 1)
        return
    rows = order[offset[0] : offset[0] + shape[0]].tolist()
    begins = [n for n in range(len(rows)) if n == 0 or rows[n] != rows[n - 1] + 1]
    for first, end in zip(begins, [*begins[1:], len(rows)]):
        yield Rows(first, rows[first], end - first)
