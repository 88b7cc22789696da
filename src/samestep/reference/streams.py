"""The reference's way to read a stream: it iterates over the job's own iterable, not by samestep.Stream's code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from samestep.reference.files import ArraysReader, WindowsReader


class StreamReader:
    """Rows of a samestep.Stream by their index, read from the iterable that it was given.

    It starts the iterable again for a row before the latest one, and where an epoch begins.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._keys: object = None
        self._epoch: int | None = None
        self._rows: Iterator[tuple[int, Any]] = iter(())
        self._latest: int | None = None

    def __len__(self) -> int:
        return int(self.stream.length)

    def set_epoch(self, epoch: int) -> None:
        """Tells the iterable that an epoch begins, where it wants to know, and starts it again."""
        if epoch != self._epoch and hasattr(self.stream.dataset, "set_epoch"):
            self.stream.dataset.set_epoch(epoch)
            self._latest = None
        self._epoch = epoch

    def key_rows(self, keys: object, key_row: Callable[[int], None]) -> None:
        """Starts the iterable again where `keys` change. key_row: seeds the random numbers that a row is read with."""
        if keys != self._keys:
            self._keys, self._latest, self._key_row = keys, None, key_row

    def __getitem__(self, index: int) -> Any:
        if self._latest is None or index <= self._latest:
            self._rows = self._keyed()
        self._latest = index
        for row, sample in self._rows:
            if row == index:
                return sample
        return self.stream[index]  # which says that it is too short

    def _keyed(self) -> Iterator[tuple[int, Any]]:
        for state in self.stream.first_state:
            self.stream.dataset.load_state_dict(copy.deepcopy(state))
            if hasattr(self.stream.dataset, "set_epoch") and self._epoch is not None:
                self.stream.dataset.set_epoch(self._epoch)  # which the state may hold, too
        samples = iter(self.stream.dataset)
        for row in range(len(self)):
            self._key_row(row)
            try:
                sample = next(samples)
            except StopIteration:
                return
            if row == len(self) - 1 and self.stream.to_its_end and next(samples, samples) is not samples:
                self.stream[row]  # which says that it is too long
            yield row, sample


def with_reader(dataset: Any) -> tuple[Any, StreamReader | None]:
    """Returns a dataset of which what samestep supplies, if it is or wraps that, is read by the reference's own code;
    and the reader of a stream, or None."""
    supplied, kind = dataset, None
    while supplied is not None and (kind := _reader_of(supplied)) is None:
        supplied = getattr(supplied, "dataset", None)
    if kind is None:
        return dataset, None
    if "reference_reader" not in vars(supplied):
        supplied.reference_reader = kind(supplied)
    reader = supplied.reference_reader
    return _replaced(dataset, supplied, reader), reader if isinstance(reader, StreamReader) else None


def _reader_of(dataset: Any) -> Callable[[Any], Any] | None:
    """What reads a dataset that samestep supplies; None for others. A subclass may read in another way."""
    if hasattr(dataset, "key_rows"):
        return StreamReader
    name = type(dataset).__name__ if type(dataset).__module__ == "samestep.data.arrays" else ""
    return {"Arrays": ArraysReader, "Windows": WindowsReader}.get(name)


def _replaced(dataset: Any, supplied: Any, reader: Any) -> Any:
    if dataset is supplied:
        return reader
    wrapper = copy.copy(dataset)
    wrapper.dataset = _replaced(dataset.dataset, supplied, reader)
    return wrapper
