"""What the recorder sees of DataLoaders: batches, indices, digests of rows, and which dataset it is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from samestep.rank.hooks import Hooks
from samestep.recorder.loaders import Loaders, identity, rows_of


@pytest.fixture
def loaders(hooks: Hooks) -> Loaders:
    attached = Loaders(lambda function: function, lambda loader: None, lambda loader: type(loader).__name__)
    attached.attach(hooks)
    return attached


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_loader_has_read_and_what_it_would_read(loaders: Loaders, workers: int) -> None:
    """Also where workers have asked for later batches already."""
    data = TensorDataset(torch.arange(20).view(10, 2), torch.arange(10))
    several: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 2} if workers else {}
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler, **several)
    sampler.set_epoch(1)
    passing = iter(loader)
    next(passing), next(passing)
    assert loaders.trained([]) == [0]
    first = loaders.passes[0].record()
    assert first.batches == [[0, 1], [2, 3]] and first.rest == [4, 5, 6, 7, 8, 9]
    assert (first.length, first.batch_size, first.trained, first.sampler) == (10, 2, 1, "DistributedSampler")
    assert len(first.digests) == 4 and all(len(each) == 2 for each in first.digests)
    assert len({tuple(each) for each in first.digests}) == 4
    del passing
    for _ in loader:
        pass
    second = loaders.passes[1].record()
    assert (second.loader, second.rest, len(second.batches)) == (0, [], 5)
    assert second.digests[:4] == first.digests and loaders.epochs_set == 1


def test_a_batch_that_is_looked_at_before_an_epoch_is_not_of_a_trained_pass(loaders: Loaders) -> None:
    """As `len(next(iter(loader))[0])` before the first epoch, whose first batch it is; two passes that are read beside
    each other are trained both."""
    loader = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    next(iter(loader))
    for batch in loader:
        loaders.trained(rows_of(batch))
    assert [loaders.passes[number].trained for number in range(2)] == [0, 3]
    first, second = iter(loader), iter(loader)
    next(second)
    batches = [next(first), next(second)]
    assert sorted(loaders.trained(rows_of(torch.cat([batch[0] for batch in batches])))) == [2, 3]
    # One that has some of its rows alone.
    next(iter(loader))
    loaders.latest = 3
    assert loaders.trained(rows_of(torch.tensor([0.0, 9.0]))) == [3]


def test_a_batch_that_was_read_before_an_evaluation_is_of_its_own_pass(loaders: Loaders) -> None:
    """Where the loop reads ahead, and one that is not read to its end is evaluated meanwhile; also without indices."""

    class Rows(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from torch.rand(8, 3)

    rows = Rows()
    ahead, held_out = iter(DataLoader(rows, batch_size=2)), iter(DataLoader(TensorDataset(torch.rand(4, 3))))
    batch = next(ahead)
    next(held_out)
    loaders.evaluated()
    assert loaders.trained(rows_of(batch)) == [0]
    next(held_out)
    assert loaders.trained(rows_of(batch + 1)) == [1], "whose rows are not known is of the pass that was read last"


def test_a_loader_that_is_made_anew_in_each_epoch_is_one(loaders: Loaders) -> None:
    """Not two that are read beside each other, nor that of another dataset."""
    data, other = TensorDataset(torch.arange(6.0)), TensorDataset(torch.arange(1.0, 7.0))
    for _ in range(2):
        for _ in DataLoader(data, batch_size=3):
            pass
        for _ in DataLoader(other, batch_size=3):
            pass
    assert [known.loader for known in loaders.passes] == [0, 1, 0, 1]
    beside = [DataLoader(data, batch_size=2) for _ in range(2)]
    for _ in zip(*beside):
        pass
    assert [known.loader for known in loaders.passes[4:]] == [2, 3]


def test_batches_of_several_loaders_that_are_joined_are_trained_together(loaders: Loaders) -> None:
    first, second, apart = (iter(DataLoader(TensorDataset(torch.rand(4, 2)), batch_size=2)) for _ in range(3))
    (labelled,), (unlabelled,), _ = next(first), next(second), next(apart)
    assert loaders.trained(rows_of(((torch.cat([labelled, unlabelled]),), {}))) == [2, 0, 1]
    next(first)
    loaders.evaluated()
    assert loaders.trained([]) == [0]


def test_a_sampler_without_an_end_is_no_list(loaders: Loaders) -> None:
    """It was listed for a million batches, in which a training seemed to hang."""

    class Endless(Sampler[int]):
        asked = 0

        def __iter__(self) -> Iterator[int]:
            while True:
                self.asked += 1
                yield self.asked % 3

    sampler = Endless()
    next(iter(DataLoader(TensorDataset(torch.ones(3)), batch_size=64, sampler=sampler)))
    assert loaders.passes[0].record().rest is None
    assert sampler.asked < 20_000


def test_a_dataset_is_told_by_what_it_holds_for_its_rows() -> None:
    class Files(Dataset[Any]):
        def __init__(self, *paths: str) -> None:
            self.paths, self.rank = paths, random.random()

        def __len__(self) -> int:
            return len(self.paths)

    whole = TensorDataset(torch.arange(6.0))
    first, second = Subset(whole, range(0, 6, 2)), Subset(whole, range(1, 6, 2))
    assert identity(first) == identity(Subset(whole, range(0, 6, 2))) != identity(second)
    assert (
        identity(whole) == identity(TensorDataset(torch.arange(6.0))) != identity(TensorDataset(torch.arange(1.0, 7)))
    )
    assert identity(Files("a", "b")) == identity(Files("a", "b")) != identity(Files("a", "c"))
    second.scalar = torch.tensor(2.0)  # type: ignore[attr-defined]  # has no length
    assert identity(second)
    assert not identity([1, 2]) and not identity(iter(()))


def test_a_loader_without_indices(loaders: Loaders) -> None:
    class Endless(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            while True:
                yield torch.zeros(2)

    next(iter(DataLoader(Endless(), batch_size=3)))
    seen = loaders.passes[0].record()
    assert (seen.batches, seen.rest, seen.length) == ([None], None, None)


def test_the_rows_of_a_models_inputs() -> None:
    x, y = torch.randn(3, 2), torch.randn(3)
    rows = rows_of(((x,), {"y": y, "scale": torch.tensor(2.0), "other": torch.ones(5)}))
    assert len({*rows}) == 3 and rows == rows_of(((x.clone(), y.clone()), {}))
    changed = y.clone()
    changed[1] += 1
    assert [a == b for a, b in zip(rows, rows_of(((x, changed), {})))] == [True, False, True]
    assert rows_of((("text",), {})) == []
