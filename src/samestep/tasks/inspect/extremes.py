"""Finds the rows of a dataset in which a mistake about single rows would show: the most and the least padded, those
with ignored targets, the heaviest, the longest, those of the rarest class.

Evenly spaced rows miss what five of a thousand have. The proof trains on some of these rows beside evenly spaced ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from samestep.data.stream import is_stream
from samestep.job import ByLength, Job
from samestep.job.walk import leaves_of
from samestep.reference.fetch import begin_epoch, generators_kept, read

# Numbers, and no time: the proof trains the same rows on every machine.
MOST_ROWS = 2000  # that are looked at, evenly spaced where there are more
MOST_BYTES = 64 << 20  # that these rows hold together, where they are read one by one: some 100 images of 224 x 224
LEAST_ROWS = 16  # that are looked at however large they are
MOST_UNREADABLE = 16  # after which no further row is read
IGNORED = -100  # the target that torch's cross entropy leaves out
CLASSES = 64  # a whole number with more values is no class

Statistics = dict[str, NDArray[Any]]  # name -> of each row


@dataclass(frozen=True)
class Extremes:
    """rows: the extreme ones, those that matter most first. looked_at: of how many rows."""

    rows: tuple[int, ...] = ()
    looked_at: int = 0


def find_extremes(job: Job) -> Extremes:
    """Looks at the job's training rows. A stream is read from its beginning, and not looked at."""
    dataset, length = job.train, len(job.train)
    if is_stream(dataset):
        return Extremes()
    rows = list(range(length)) if length <= MOST_ROWS else [i * length // MOST_ROWS for i in range(MOST_ROWS)]
    if type(dataset) is TensorDataset:
        columns = [tensor[rows] for tensor in dataset.tensors]
        leaves = _merged(_statistics(_array(column, len(rows))) for column in columns)
    else:
        found = list(_looked_at(job, rows))
        rows = [row for row, _ in found]
        leaves = _stacked([statistics for _, statistics in found])
    if not rows:
        return Extremes()
    row_statistics: Statistics = {}
    if job.weight:
        row_statistics["weight"] = np.array([float(job.weight(row)) for row in rows])
    if isinstance(job.order, ByLength):
        row_statistics["length"] = np.array([job.order.lengths[row] for row in rows])
    places = list(_extreme_places(row_statistics | leaves))
    usable = leaves.get("not finite", np.zeros(len(rows)))
    return Extremes(tuple(dict.fromkeys(rows[place] for place in places if not usable[place])), len(rows))


def _looked_at(job: Job, rows: list[int]) -> Iterator[tuple[int, Statistics]]:
    """Yields a row and its statistics. What cannot be read is reported where it is trained."""
    read_rows = read_bytes = unreadable = 0
    with generators_kept():
        begin_epoch(job.train, 0)
        for row in _spread_first(rows):
            is_enough = read_rows >= LEAST_ROWS and read_bytes >= MOST_BYTES
            if is_enough or unreadable == MOST_UNREADABLE:
                return
            try:
                (sample,) = read(job, job.train, [row], 0)
                columns = [_array(leaf, None) for leaf in leaves_of(sample)]
                statistics = _merged(map(_statistics, columns))
            except Exception:
                unreadable += 1
                continue
            read_rows += 1
            read_bytes += sum(column.nbytes for column in columns)
            yield row, statistics


def _spread_first(rows: list[int]) -> list[int]:
    """The rows in such an order that any first ones are spread over all of them."""
    step, taken, order = len(rows), set[int](), list[int]()
    while step:
        order += [place for place in range(0, len(rows), step) if place not in taken]
        taken.update(order)
        step //= 2
    return [rows[place] for place in order]


def _array(leaf: Any, rows: int | None) -> NDArray[Any]:
    """A leaf's numbers, shape [rows, numbers]; of a text its length. rows: None: of one row."""
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().float().numpy() if leaf.dtype.itemsize < 4 and leaf.is_floating_point() else leaf
        leaf = leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf
    if isinstance(leaf, str | bytes):
        leaf = len(leaf)
    array = np.asarray(leaf)
    if array.dtype.kind not in "biuf":
        return np.zeros((rows or 1, 0))
    return array.reshape(rows or 1, -1)


def _statistics(numbers: NDArray[Any]) -> Statistics:
    """Of each row of `numbers`, shape [rows, numbers]."""
    count = numbers.shape[1]
    found = {"size": np.full(len(numbers), count)}
    if not count:
        return found
    is_whole = numbers.dtype.kind in "biu"
    if not is_whole:
        found["not finite"] = (~np.isfinite(numbers)).sum(1)
    if count == 1:
        found["class" if is_whole else "number"] = numbers[:, 0]
    elif is_whole and numbers.min() >= 0 and numbers.max() <= 1:
        found["mask"] = numbers.sum(1)
    if numbers.dtype.kind in "if":
        found["ignored"] = (numbers == IGNORED).sum(1)
    if count > 1:
        found["end"] = _run(numbers[:, ::-1])
        found["beginning"] = _run(numbers)
        found["zeros"] = (numbers == 0).sum(1)
    return found


def _run(numbers: NDArray[Any]) -> NDArray[Any]:
    """How many of the first numbers of each row are alike: padding, whatever it is padded with."""
    alike = numbers == numbers[:, :1]
    lengths: NDArray[Any] = np.where(alike.all(1), numbers.shape[1], (~alike).argmax(1))
    return lengths


def _merged(leaves: Any) -> Statistics:
    """The statistics of all leaves, by the leaf's number; what is not finite in any."""
    merged: Statistics = {}
    for number, statistics in enumerate(leaves):
        for name, values in statistics.items():
            if name == "not finite":
                merged[name] = merged.get(name, 0) + values
            else:
                merged[f"{name} {number}"] = values
    return merged


def _stacked(rows: list[Statistics]) -> Statistics:
    """The statistics of all rows, where each row has them."""
    names = [name for name in (rows[0] if rows else ()) if all(name in row for row in rows)]
    return {name: np.concatenate([row[name] for row in rows]) for name in names}


ORDER = ("weight", "length", "ignored", "end", "mask", "size", "class", "zeros", "number", "beginning")


def _extreme_places(statistics: Statistics) -> Iterator[int]:
    """Yields the places of the rows with the least and the most of each, and of the rarest class."""
    for kind in ORDER:
        for name, values in statistics.items():
            if name.split(" ")[0] != kind or values.min() == values.max():
                continue
            yield int(values.argmax())
            yield int(values.argmin())
            if kind == "class":
                classes, first, counts = np.unique(values, return_index=True, return_counts=True)
                if len(classes) <= CLASSES:
                    yield int(first[counts.argmin()])
