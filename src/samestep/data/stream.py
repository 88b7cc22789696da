"""A stream as rows by number: what can only be read from its beginning, shared out so that no row is seen twice."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset

from samestep.errors import UserError
from samestep.job import nested

NOTHING = object()


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is a Stream, or a subset of one: it is read from its beginning."""
    return any(isinstance(each, Stream) for each in nested(dataset))


class Stream(Dataset[Any]):
    """`Stream(dataset, length=100_000)`, for a job with `shuffle=False`: rows in the order in which they come.

    dataset: an IterableDataset, or anything else that `iter()` starts anew with the same samples. It must not share
    itself out: every rank reads it all and keeps its own rows, which costs as many readings as there are ranks. Its
    `set_epoch(epoch)`, where it has one, is called before each epoch, and may change the order.
    length: rows of an epoch; the stream may have more. None: as many as `len(dataset)` says, neither more nor less.
    Raises UserError, here for what has no length or is read only once, later for a stream that ends too early.
    """

    one_order = True  # which Job looks for

    def __init__(self, dataset: Iterable[Any], length: int | None = None) -> None:
        if isinstance(dataset, Iterator):
            raise UserError(
                f"a {type(dataset).__name__} can be read once, and each epoch reads anew; give Stream an object whose "
                "__iter__ starts again, such as an IterableDataset"
            )
        self.to_its_end = length is None
        if length is None:
            try:
                length = len(dataset)  # type: ignore[arg-type]
            except TypeError:
                raise UserError(
                    f"a {type(dataset).__name__} does not say how long it is; give the rows of an epoch: "
                    "Stream(dataset, length=…)"
                ) from None
        if length < 0:
            raise UserError(f"Stream(length={length}): the rows of an epoch cannot be fewer than none")
        self.dataset, self.length = dataset, length
        self._rewind()

    def _rewind(self) -> None:
        self._rows: Iterator[Any] | None = None
        self._next = 0  # the row that comes next
        self._kept: dict[int, Any] = {}  # the rows of the latest call, which may be asked for again
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("dataset", "length", "to_its_end")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._rewind()

    def set_epoch(self, epoch: int) -> None:
        """Call before an epoch's rows are read. No other process and no thread may be reading then."""
        told = getattr(self.dataset, "set_epoch", None)
        if told is not None and epoch != getattr(self, "_epoch", None):
            self._epoch = epoch
            told(epoch)
            self._rewind()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The rows at `indices`. Quick where they come after those of the call before: else the stream starts anew."""
        if self._process != os.getpid():
            self._rewind()  # what another process has opened, it reads itself
        kept = self._kept
        self._kept = {index: kept[index] if index in kept else self._at(index) for index in sorted({*indices})}
        return [self._kept[index] for index in indices]

    def _at(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(f"row {index} of {self.length}")
        if self._rows is None or index < self._next:
            self._rows, self._next = iter(self.dataset), 0
        for _ in range(index - self._next + 1):
            sample = next(self._rows, NOTHING)
            if sample is NOTHING:
                raise UserError(self._ended(f"ended after {self._next} of its {self.length} rows"))
            self._next += 1
        if self.to_its_end and index == self.length - 1 and next(self._rows, NOTHING) is not NOTHING:
            raise UserError(self._ended(f"has more rows than the {self.length} that it says"))
        return sample

    def _ended(self, what: str) -> str:
        return (
            f"the stream {what}; give its true length, Stream(dataset, length=…), and let it not share itself out to "
            "ranks or workers: each rank reads all of it and keeps its own rows"
        )
