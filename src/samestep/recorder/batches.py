"""Batches and models' inputs of several ranks: copied, joined into those of one process, and split again."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from samestep.bounds import ABOVE_ZERO_FLOAT32, FITTED_ROWS_APART, FITTED_SCALE_APART, FITTED_SHIFT_APART
from samestep.job.foreign import attribute_of, defines, is_a
from samestep.job.walk import held_by_object, items_of, known_leaves, with_attributes
from samestep.message import Message, message

MOST_TENSORS = 64  # how many tensors a script joins to one batch
COLUMNS, MOST_ROWS = 256, 4096  # the most columns and rows of the values by which rows are found again
FIT_ROWS = 4  # the fewest rows of a rank by which a scale is fitted


class CannotJoin(Exception):
    """Batches that cannot be joined. why: the reason."""

    def __init__(self, why: Message) -> None:
        super().__init__(why)
        self.why = why


class Packed:
    """Data of a script as bytes: their classes are those of the script, and known only while it runs."""

    def __init__(self, data: Any) -> None:
        packed = io.BytesIO()
        torch.save(data, packed)
        self._bytes = packed.getvalue()

    def opened(self) -> Any:
        """Returns the data. Raises what unpickling raises where a class is not known."""
        return torch.load(io.BytesIO(self._bytes), weights_only=False)


def copied(data: Any) -> Any:
    """Returns a copy of a batch or a forward's inputs, on the CPU, without its graph."""
    if is_a(data, Tensor):
        return data.detach().cpu().clone()
    return _mapped(data, [data], lambda values: copied(values[0])) if _is_tree(data) else copy.deepcopy(data)


def joined(parts: Sequence[Any], rows: Sequence[int] = ()) -> Any:
    """Returns the ranks' batches as one: tensors and lists are put together, numbers of rows are added up, of all else
    the first is taken.

    rows: how many rows the batch of each rank has; its tensors tell. Raises CannotJoin where rows have different
    shapes.
    """
    first = parts[0]
    rows = rows or [_rows_in(part) for part in parts]
    if type(first) is int and first > 1 and [*parts] == [*rows]:
        return sum(parts)
    if is_a(first, Tensor):
        if not first.dim():
            if any(not torch.equal(first, part) for part in parts):
                raise CannotJoin(message("scalars_differ_between_ranks"))
            return first
        if len({part.shape[1:] for part in parts}) > 1:
            raise CannotJoin(message("rows_of_different_shapes"))
        return torch.cat(list(parts))
    if _is_tree(first):
        return _mapped(first, parts, lambda values: joined(values, rows))
    if is_a(first, list):
        return [value for part in parts for value in part]
    return first


def _rows_in(data: Any) -> int:
    """Returns how many rows a batch has: so many as its first tensor."""
    return next((len(leaf) for leaf in known_leaves(data) if is_a(leaf, Tensor) and leaf.dim()), 0)


def is_joined(inputs: Any, parts: Sequence[Any]) -> bool:
    """Returns whether inputs are those of the ranks, put together along the rows or, of a sequence, along another
    dimension.

    What all ranks have alike must be the same.
    """
    if is_a(inputs, Tensor):
        return _is_joined_tensor(inputs.detach().cpu(), parts)
    if defines(inputs, "keys"):
        names = inputs.keys()
        same_names = all(part.keys() == names for part in parts)
        return same_names and all(is_joined(inputs[name], [part[name] for part in parts]) for name in names)
    if is_a(inputs, tuple | list):
        return all(len(part) == len(inputs) for part in parts) and all(map(is_joined, inputs, zip(*parts)))
    if (held := _held(inputs)) is not None:
        others = [_held(part) or {} for part in parts]
        same_names = all(other.keys() == held.keys() for other in others)
        return same_names and all(is_joined(held[name], [other[name] for other in others]) for name in held)
    return bool(all(part == inputs for part in parts))


def _is_joined_tensor(inputs: Tensor, parts: Sequence[Tensor]) -> bool:
    if all(part.shape == inputs.shape for part in parts):
        return all(torch.equal(part, inputs) for part in parts)
    for dim in range(inputs.dim()):
        without = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (inputs, *parts)}
        fits = len(without) == 1 and sum(part.shape[dim] for part in parts) == inputs.shape[dim]
        if fits and torch.equal(torch.cat(list(parts), dim), inputs):
            return True
    return False


@dataclass(frozen=True)
class RowOrder:
    """Which row of the ranks each row of one process is. sizes: rows of each rank. places: for each row of one process,
    its place among the rows of rank 0, then of rank 1, and so on."""

    sizes: list[int]
    places: list[int]

    @property
    def keeps_ranks(self) -> bool:
        """Whether one process has each rank's rows in the rank's own order, between those of the other ranks.

        Otherwise what the script has made of its rows, such as `rows.roll(1, 0)`, stands beside other targets.
        """
        ends = [sum(self.sizes[: rank + 1]) for rank in range(len(self.sizes))]
        of_ranks = [
            [place for place in self.places if end - size <= place < end] for size, end in zip(self.sizes, ends)
        ]
        return all(places == sorted(places) for places in of_ranks)

    def rows_of_rank(self, data: Any, rank: int) -> Any:
        """Returns the rows of one rank of a model's inputs, in the order in which the rank had them."""
        if is_a(data, Tensor):
            if not data.dim() or len(data) != len(self.places):
                return data
            first = sum(self.sizes[:rank])
            return data[self._sorted[first : first + self.sizes[rank]].to(data.device)]
        return _mapped(data, [data], lambda values: self.rows_of_rank(values[0], rank)) if _is_tree(data) else data

    def joined_outputs(self, parts: Sequence[Any], lists: int = 1) -> Any:
        """Returns the outputs of a model that was called for each rank's rows, as one process has them: scalars are
        averaged. lists: how many tensors of rows a list of inputs has, whose outputs may follow each other."""
        first = parts[0]
        if is_a(first, Tensor):
            return self._joined(parts, lists) if first.dim() else torch.stack(list(parts)).mean()
        return _mapped(first, parts, lambda values: self.joined_outputs(values, lists)) if _is_tree(first) else first

    @cached_property
    def _sorted(self) -> Tensor:
        return torch.tensor(self.places).argsort()

    def _joined(self, parts: Sequence[Tensor], lists: int) -> Tensor:
        gathered = torch.cat(list(parts))
        times, remainder = divmod(len(gathered), len(self.places))
        if remainder or any(len(part) != times * size for part, size in zip(parts, self.sizes)):
            return gathered
        places = torch.tensor(self.places, device=gathered.device)
        if lists > 1 and times == lists:  # one list's rows, then the next one's
            return torch.cat([torch.cat(chunks)[places] for chunks in zip(*(part.chunk(lists) for part in parts))])
        return gathered.unflatten(0, (-1, times))[places].flatten(0, 1) if times else gathered


def order_of_rows(rows: Sequence[str], ranks: Sequence[Sequence[str]]) -> RowOrder | None:
    """Returns which row of the ranks each row of one process is, by their digests; None where they have others."""
    sizes, recorded = [len(of_rank) for of_rank in ranks], [row for of_rank in ranks for row in of_rank]
    for places in _usual_orders(sizes):
        if [recorded[place] for place in places] == list(rows):
            return RowOrder(sizes, places)
    if Counter(recorded) != Counter(rows):
        return None
    left: dict[str, list[int]] = {}
    for place, row in reversed([*enumerate(recorded)]):
        left.setdefault(row, []).append(place)
    return RowOrder(sizes, [left[row].pop() for row in rows])


def order_of_values(inputs: Any, ranks: Sequence[Any], near: float) -> RowOrder | None:
    """Returns the same by the values of the rows, which may differ by so much of the largest one's size."""
    of_ranks = [row_values(of_rank) for of_rank in ranks]
    is_alike = len({part.shape[1] for part in of_ranks}) == 1
    values, recorded = row_values(inputs), torch.cat(of_ranks) if is_alike else None
    if recorded is None or values.shape != recorded.shape or not len(values):
        return None
    sizes, bound = [len(of_rank) for of_rank in of_ranks], near * float(recorded.norm(dim=1).max())
    for places in _usual_orders(sizes):
        if float((values - recorded[places]).norm(dim=1).max()) <= bound:
            return RowOrder(sizes, places)
    if len(values) > MOST_ROWS:
        return None
    distances, nearest = torch.cdist(values, recorded).min(1)
    is_order = len({*nearest.tolist()}) == len(values) and float(distances.max()) <= bound
    return RowOrder(sizes, nearest.tolist()) if is_order else None


def is_rescaled_by_rank(inputs: Any, ranks: Sequence[Any]) -> bool:
    """Returns whether the ranks' rows are those of one process, but for a scale and a shift of each column that are
    another one on each rank: they were normalised by the rank's own rows."""
    if any(of_rank is None for of_rank in ranks):
        return False
    values, of_ranks = row_values(inputs), [row_values(of_rank) for of_rank in ranks]
    if sum(map(len, of_ranks)) != len(values) or any(len(of_rank) < FIT_ROWS for of_rank in of_ranks):
        return False
    scales = []
    for replayed, recorded in zip(values.split([len(of_rank) for of_rank in of_ranks]), of_ranks):
        if replayed.shape != recorded.shape:
            return False
        apart, fitted = replayed - replayed.mean(0), recorded - recorded.mean(0)
        scale = (apart * fitted).sum(0) / (fitted**2).sum(0).clamp(min=ABOVE_ZERO_FLOAT32)
        if float((apart - scale * fitted).norm()) > FITTED_ROWS_APART * float(apart.norm()):
            return False
        scales.append(torch.stack([scale, replayed.mean(0) - scale * recorded.mean(0)]))
    return any(
        not torch.allclose(scale, scales[0], rtol=FITTED_SCALE_APART, atol=FITTED_SHIFT_APART) for scale in scales
    )


def row_values(data: Any) -> Tensor:
    """Returns a line of numbers for each row of a model's inputs, of at most COLUMNS of each tensor."""
    leaves = [leaf.detach().cpu() for leaf in known_leaves(data) if is_a(leaf, Tensor) and leaf.dim()]
    leaves = [leaf.flatten(1) if leaf.dim() > 1 else leaf[:, None] for leaf in leaves if len(leaf) == len(leaves[0])]
    columns = [leaf[:, :: leaf.shape[1] // COLUMNS + 1].double() for leaf in leaves]
    return torch.cat(columns, 1) if columns else torch.empty(0, 0)


def lists_of_rows(data: Any, rows: int) -> int:
    """Returns how many tensors of so many rows stand beside each other in a list or tuple of inputs, as crops do."""
    if is_a(data, list | tuple):
        lists = sum(is_a(value, Tensor) and value.dim() > 0 and len(value) == rows for value in data)
        return max([lists, *(lists_of_rows(value, rows) for value in data if not is_a(value, Tensor))], default=0)
    return 0


def _usual_orders(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields the orders in which one process has the ranks' rows where it joins what it has read: rank after rank, or,
    of several tensors that are joined (views, crops), one after the other."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    for count in range(1, MOST_TENSORS + 1):
        if not any(size % count for size in sizes):
            lengths = [size // count for size in sizes]
            yield [
                start + number * length + place
                for number in range(count)
                for start, length in zip(starts, lengths)
                for place in range(length)
            ]


def holds_loss(data: Any, graph: bool = True) -> bool:
    """Returns whether a model's output holds a loss: a scalar; graph: with a gradient."""
    if is_a(data, Tensor):
        return not data.dim() and (data.requires_grad or not graph) and data.is_floating_point()
    parts = [data[key] for key in data.keys()] if defines(data, "keys") else data  # noqa: SIM118
    return is_a(parts, tuple | list) and any(holds_loss(part, graph) for part in parts)


def moved_like(data: Any, like: Any) -> Any:
    """Returns inputs on the devices of others of the same structure."""
    if is_a(data, Tensor):
        return data.to(like.device) if is_a(like, Tensor) else data
    return _mapped(data, [data, like], lambda values: moved_like(*values)) if _is_tree(data) else data


def _is_tree(data: Any) -> bool:
    if defines(data, "keys"):
        return True
    is_sequence = is_a(data, tuple) or (is_a(data, list) and any(is_a(value, Tensor) for value in data))
    return is_sequence or _held(data) is not None


def _held(data: Any) -> dict[str, Any] | None:
    """Returns what an object of a class of the script's own holds, or a dataclass; None of any other value."""
    return items_of(data) if is_dataclass(type(data)) else held_by_object(data)


def _mapped(first: Any, parts: Sequence[Any], function: Callable[[list[Any]], Any]) -> Any:
    """Returns a mapping or sequence of the same kind, whose values are function([that value of each part])."""
    if defines(first, "keys"):
        values = {key: function([part[key] for part in parts]) for key in first.keys()}  # noqa: SIM118
        if type(first) is dict:
            return values
        try:
            return type(first)(**values)  # as the outputs of transformers' models
        except TypeError:
            return type(first)(values)  # as the batches of transformers
    if (held := _held(first)) is not None:
        changed = {name: function([attribute_of(part, name) for part in parts]) for name in held}
        return with_attributes(first, changed)
    return _sequence(first, [function([part[i] for part in parts]) for i in range(len(first))])


def _sequence(like: Any, values: list[Any]) -> Any:
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)


class Outputs:
    """Knows the tensors that models or loaders have returned, and what shares their memory, as detach() does."""

    def __init__(self) -> None:
        self._known: set[StorageWeakRef] = set()

    def add(self, output: Any) -> None:
        """Takes note of what was returned; forgets what is no longer there."""
        new = {StorageWeakRef(leaf.untyped_storage()) for leaf in known_leaves(output) if is_a(leaf, Tensor)}
        self._known = {storage for storage in self._known if not storage.expired()} | new

    def are_used_in(self, inputs: Any) -> bool:
        """Returns whether a model's inputs are computed from one of these outputs."""
        return any(
            tensor.requires_grad or StorageWeakRef(tensor.untyped_storage()) in self._known
            for tensor in _tensors(inputs)
        )

    def are_all_of(self, inputs: Any) -> bool:
        """Returns whether all tensors of a model's inputs are these, or share their memory."""
        tensors = [leaf for leaf in known_leaves(inputs) if is_a(leaf, Tensor)]
        known = all(StorageWeakRef(tensor.untyped_storage()) in self._known for tensor in tensors)
        # A view of some of the rows is another tensor.
        fill_storage = all(
            tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() for tensor in tensors
        )
        return bool(tensors) and known and fill_storage


def are_pieces(inputs: Any, parts: Sequence[Any]) -> bool:
    """Returns whether inputs hold the elements of several ranks' pieces of them, in whichever order these were cut."""
    whole_leaves, of_parts = _leaves(inputs), [_leaves(part) for part in parts]
    if not whole_leaves or any(len(leaves) != len(whole_leaves) for leaves in of_parts):
        return False
    for number, tensor in enumerate(whole_leaves):
        pieces = [leaves[number] for leaves in of_parts]
        if all(torch.equal(piece, tensor) for piece in pieces):
            continue
        together = torch.cat([piece.flatten() for piece in pieces])
        if together.numel() != tensor.numel() or not torch.equal(
            together.sort().values, tensor.flatten().sort().values
        ):
            return False
    return True


def _leaves(data: Any) -> list[Tensor]:
    return [leaf.detach().cpu() for leaf in known_leaves(data) if is_a(leaf, Tensor)]


def _tensors(data: Any) -> list[Tensor]:
    """Returns the tensors of floating point that a tree holds."""
    return [leaf for leaf in known_leaves(data) if is_a(leaf, Tensor) and leaf.is_floating_point()]
