"""A stream gives the rows that it has, by number, and says when it has others than it claims."""

from __future__ import annotations

import multiprocessing
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, IterableDataset, Subset

from conformance import jobs_drawn
from samestep.data.loader import batches, workers_of
from samestep.data.schedule import schedule_of
from samestep.data.stream import Stream
from samestep.errors import UserError
from samestep.world import World


class Numbers(IterableDataset[int]):
    def __init__(self, count: int, says: int | None = None) -> None:
        self.count, self.says, self.begun = count, says, 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(100, 100 + self.count))


class Sized(Numbers):
    def __len__(self) -> int:
        return self.count if self.says is None else self.says


def test_rows_by_number_in_one_reading_where_they_follow_one_another() -> None:
    numbers = Numbers(20)
    stream = Stream(numbers, length=20)
    assert [stream.__getitems__([3, 1, 3]), stream[7], stream[7], stream[19]] == [[103, 101, 103], 107, 107, 119]
    assert numbers.begun == 1
    assert stream[2] == 102 and numbers.begun == 2
    with pytest.raises(IndexError, match="row 20"):
        stream[20]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_row_once_an_epoch_in_order_on_any_number_of_ranks(size: int, workers: int) -> None:
    job = replace(jobs_drawn.job(stream=True, rows=29), workers=workers)
    schedule = schedule_of(job, size)
    for epoch, direction in ((0, 1), (1, -1)):  # this stream's second epoch runs backwards
        seen = []
        for rank in range(size):
            for batch in batches(job, World(rank=rank, size=size), schedule, 2 * schedule.steps_per_epoch):
                if batch.micro_batch.epoch == epoch:
                    rows = zip(batch.micro_batch.indices[: batch.micro_batch.rows].tolist(), batch.data[0])
                    seen += [(index, inputs.tolist()) for index, inputs in rows]
        rows_of = [inputs.tolist() for inputs, *_ in jobs_drawn.job(rows=29).train][::direction]  # type: ignore[attr-defined]
        assert Counter(index for index, _ in seen) == Counter(range(29))
        assert all(inputs == rows_of[index] for index, inputs in seen)


class OneNode(Numbers):
    """Refuses several ranks, as webdataset does by default."""

    def __iter__(self) -> Iterator[int]:
        raise ValueError("you need to add an explicit nodesplitter to your input pipeline for multi-node training")
        yield 0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Stream(Numbers(3)), "a Numbers does not say how long it is; give the rows of an epoch"),
        (lambda: Stream(iter(range(9)), 9), "a range_iterator can be read once, and each epoch reads anew"),
        (lambda: Stream(Numbers(9), 12)[9], "the stream ended after 9 of its 12 rows; give its true length"),
        (lambda: Stream(Sized(9, says=8))[7], "the stream has more rows than its length of 8"),
        (lambda: Stream(DataLoader(Numbers(9), 3), 3), "a DataLoader gives batches, and a Stream is read row by row"),
        (lambda: Stream(OneNode(9), 9)[0], "each rank reads the whole stream .*nodesplitter=None"),
    ],
)
def test_what_is_wrong_with_it_is_said(make: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()  # type: ignore[operator]


def test_a_length_that_is_given_may_be_shorter() -> None:
    assert Stream(Numbers(1000), 8)[7] == 107 and Stream(Sized(9))[8] == 108


class Bytes(IterableDataset[int]):
    """Reads a file byte by byte: a forked process shares its place in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[int]:
        with open(self.path, "rb", buffering=0) as file:
            while byte := file.read(1):
                yield byte[0]


def test_other_processes_read_it_themselves(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(100)))
    stream = Stream(Bytes(tmp_path / "bytes"), length=100)
    assert stream[4] == 4
    assert pickle.loads(pickle.dumps(stream))[5] == 5
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    other = context.Process(target=lambda: answers.put(stream[50]))
    other.start()
    assert answers.get() == 50
    other.join(30)
    assert stream[5] == 5


def test_an_epoch_is_told_also_to_what_is_inside_of_a_subset() -> None:
    job = jobs_drawn.job(stream=True, rows=20)
    inside = Subset(job.train, range(20))  # type: ignore[arg-type]
    list(batches(replace(job, train=inside), World(), schedule_of(job, 1), schedule_of(job, 1).steps_per_epoch + 1))
    assert job.train.dataset.epoch == 1  # type: ignore[attr-defined]


class Turned(Numbers):
    """Each epoch begins elsewhere."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)

    def __iter__(self) -> Iterator[int]:
        first = 1000 * self.told[-1]
        return iter(range(first, first + self.count))


def test_a_new_epoch_is_read_anew_and_told_once() -> None:
    turned = Turned(6)
    job = replace(jobs_drawn.job(), train=Stream(turned, 6), shuffle=False, global_batch=6, augment=None, collate=list)
    (first, second) = batches(job, World(), schedule_of(job, 1), 2)  # an epoch of one step: the same indices again
    assert (first.data, second.data) == ([*range(6)], [*range(1000, 1006)])
    small = replace(job, global_batch=2)
    turned.told.clear()
    assert len(list(batches(small, World(), schedule_of(small, 1), 6))) == 6
    assert turned.told == [0, 1]


class Stateful(Turned):
    """Goes on where it was left; its state holds its place and its epoch, as Hugging Face's does."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.count:
            self.at += 1
            yield 1000 * (self.told[-1] if self.told else 0) + self.at - 1

    def state_dict(self) -> dict[str, object]:
        return {"at": self.at, "told": self.told}

    def load_state_dict(self, state: dict[str, object]) -> None:
        vars(self).update(state)


def test_a_stateful_dataset_begins_each_time_with_its_first_state() -> None:
    stream = Stream(Stateful(9), 9)
    assert [stream[4], stream[2], pickle.loads(pickle.dumps(stream))[3], stream[3]] == [4, 2, 3, 3]
    stream.set_epoch(1)
    assert [stream[8], stream[0]] == [1008, 1000]


def test_one_worker_reads_a_stream() -> None:
    job = replace(jobs_drawn.job(), train=Subset(Stream(Numbers(9), 9), range(3)), workers=4, shuffle=False)
    assert workers_of(job) == 1
    assert workers_of(replace(job, train=Subset(range(9), range(3)))) == 4  # type: ignore[arg-type]


def test_a_length_below_zero_is_said() -> None:
    with pytest.raises(UserError, match="length=-1"):
        Stream(Numbers(3), length=-1)
