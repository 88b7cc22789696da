"""Stream: a map-style dataset over an IterableDataset, so that the schedule can divide its rows among the ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset

from samestep.errors import Refused, UserError
from samestep.job.checks import nested
from samestep.job.function_checks import is_of_torch

END = object()


def is_stream(dataset: Any) -> bool:
    """Returns whether a dataset is a Stream or a subset of one, which can only be read in order."""
    return any(isinstance(base, Stream) for base in nested(dataset))


class Stream(Dataset[Any]):
    """A dataset that is read in order, for a job with `shuffle=False`: `Stream(dataset, length=100_000)`.

    dataset: an IterableDataset, or any iterable whose `iter()` starts again with the same samples. It must not split
    itself among the ranks: every rank reads all of it and keeps its own rows. Its `set_epoch(epoch)`, if it has one, is
    called before each epoch and may change the order. One with torchdata's `state_dict` and `load_state_dict`, which
    would go on where it was left, begins each time with the state that it has now.
    length: rows of an epoch; the stream may have more. None: exactly `len(dataset)`.
    Raises UserError for a dataset without a length, that can be read only once or gives batches, and later for a stream
    that ends too early.
    """

    one_order = True  # Job refuses to shuffle a dataset that has this

    def __init__(self, dataset: Iterable[Any], length: int | None = None) -> None:
        if isinstance(dataset, Iterator):
            raise UserError(
                f"a {type(dataset).__name__} can be read once, and each epoch reads anew; give Stream an object whose "
                "__iter__ starts again, such as an IterableDataset"
            )
        if is_of_torch(dataset, "DataLoader") and getattr(dataset, "batch_size", None) is not None:
            raise UserError(
                f"a {type(dataset).__name__} gives batches, and a Stream is read row by row, of which each rank makes "
                "its own batches; give the loader's dataset: Stream(loader.dataset, length=…) where it is iterable, "
                "else train=loader.dataset"
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
            raise UserError(f"Stream(length={length}): length is the number of rows in an epoch, 0 or more")
        self.dataset, self.length = dataset, length
        stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        # In a tuple: of a dataset that nobody has read, Hugging Face's is None.
        self.first_state = (copy.deepcopy(dataset.state_dict()),) if stateful else ()  # type: ignore[attr-defined]
        self._key_row: Callable[[int], None] | None = None
        self._rewind()

    def _rewind(self) -> None:
        self._rows: Iterator[Any] | None = None
        self._next = 0  # the index of the next row
        self._kept: dict[int, Any] = {}  # the rows of the latest call, which the next one may repeat
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("dataset", "length", "to_its_end", "first_state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._key_row = None
        self._rewind()

    def set_epoch(self, epoch: int) -> None:
        """Calls the dataset's set_epoch, and starts it again. No other process or thread may be reading it then."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None and epoch != getattr(self, "_epoch", None):
            self._epoch = epoch
            set_epoch(epoch)
            self._rewind()

    def key_rows(self, key_row: Callable[[int], None]) -> None:
        """Starts the dataset again, and calls `key_row` with each row's index before it is read from there."""
        self._key_row = key_row
        self._rewind()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Returns the rows at `indices`. Starts the stream again unless they come after those of the previous call."""
        if self._process != os.getpid():
            self._rewind()  # the iterator was opened in another process
        previous = self._kept
        self._kept = {index: previous[index] if index in previous else self._at(index) for index in sorted({*indices})}
        return [self._kept[index] for index in indices]

    def _at(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(f"row {index} of {self.length}")
        if self._rows is None or index < self._next:
            self._rows, self._next = self._from_first_row(), 0
        for _ in range(index - self._next + 1):
            if self._key_row:
                self._key_row(self._next)
            sample = self._read()
            if sample is END:
                raise UserError(self._wrong_length(f"ended after {self._next} of its {self.length} rows"))
            self._next += 1
        if self.to_its_end and index == self.length - 1 and next(self._rows, END) is not END:
            raise UserError(self._wrong_length(f"has more rows than its length of {self.length}"))
        return sample

    def _read(self) -> Any:
        assert self._rows is not None
        try:
            return next(self._rows, END)
        except ValueError as error:
            if "nodesplitter" not in str(error):
                raise
            raise Refused(
                "webdataset reads on several ranks where it is told how to split the shards among them, and here each "
                "rank reads the whole stream and keeps its own rows; write WebDataset(…, nodesplitter=None)"
            ) from error

    def _from_first_row(self) -> Iterator[Any]:
        for state in self.first_state:
            self.dataset.load_state_dict(copy.deepcopy(state))  # type: ignore[attr-defined]
            if hasattr(self, "_epoch"):
                self.dataset.set_epoch(self._epoch)  # type: ignore[attr-defined]
        return iter(self.dataset)

    def _wrong_length(self, what: str) -> str:
        return (
            f"the stream {what}; give its true length, Stream(dataset, length=…), and do not let it split itself among "
            "ranks or workers: each rank reads all of it and keeps its own rows"
        )
