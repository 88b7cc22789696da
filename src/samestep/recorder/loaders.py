"""Records which rows DataLoaders read: the indices of each batch, and digests of the tensors that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, dataloader
from torch.utils.data.distributed import DistributedSampler

from samestep.job.foreign import answer, attribute_of, attributes_of, defines, is_a
from samestep.job.walk import known_leaves
from samestep.rank.digests import digest_rows
from samestep.rank.hooks import Hooks
from samestep.records.script import PassRecord

ITERATOR: Any = dataloader._BaseDataLoaderIter
SKIPS = "SkipBatchSampler"  # Accelerate's sampler of the rest of an epoch, after a resume
ENDLESS = 4, 10_000  # a sampler is endless that gives more indices than 4 times the dataset's rows, and than 10,000
SEQUENCES = list, tuple, range, Tensor, np.ndarray, np.memmap
PLAIN = int, str, float, bytes


@dataclass
class Pass:
    """One pass over a loader that is being read."""

    loader: int
    """The number of the loader."""

    length: int | None
    """The number of rows of the loader's dataset. None: the dataset does not tell."""

    batch_size: int | None
    """The batch size of the loader. None: the loader has none."""

    sampler: str
    """The name of the sampler's class, or of Accelerate's SkipBatchSampler where the loader has one."""

    iterator: Any
    """The iterator of the loader. Its sampler tells which rows would be read next."""

    requested: list[list[int] | None] = field(default_factory=list)
    """The indices of each batch that was requested, None for those that are no numbers. Loader workers run ahead of
    what is read."""

    read: int = 0
    """How many batches were read."""

    batch: Any = None
    """The batch that was read last. None: none was, or the pass has come to its end."""

    digests: list[list[str]] = field(default_factory=list)
    """The digests of each row that was read, one of each of its tensors."""

    trained: int = 0
    """How many training forward passes used batches of this pass."""

    ended: bool = False
    """Whether the pass has come to its end."""

    dataset: str = ""
    """A digest of what the dataset holds for its first, middle and last row. '': not known."""

    workers: int = 0
    """The number of loader workers."""

    def record(self) -> PassRecord:
        """Returns what was read, and lists what this pass would read after it."""
        ahead = self.requested[self.read :]
        return PassRecord(
            loader=self.loader,
            length=self.length,
            batch_size=self.batch_size,
            batches=self.requested[: self.read],
            rest=[] if self.ended else _flat([*ahead, *self._sampled()]),
            digests=self.digests,
            trained=self.trained,
            sampler=self.sampler,
            dataset=self.dataset,
            workers=self.workers,
        )

    def _sampled(self) -> Iterator[list[int] | None]:
        sampler = getattr(self.iterator, "_sampler_iter", None)
        left = ENDLESS[0] * (self.length or 0) + ENDLESS[1]
        while sampler is not None and left > 0:
            if (batch := next(sampler, None)) is None:
                return
            indices = _indices(batch)
            left -= len(indices or (0,))
            yield indices
        yield None  # the sampler has no end


def _indices(batch: Any) -> list[int] | None:
    """Returns the indices of a batch as plain numbers; None where they are others."""
    indices = list(batch) if is_a(batch, list | tuple | Tensor) else [batch]
    try:
        return [int(index) for index in indices]
    except (TypeError, ValueError):
        return None


def _flat(batches: list[list[int] | None]) -> list[int] | None:
    return None if any(batch is None for batch in batches) else [i for batch in batches if batch for i in batch]


class Loaders:
    """Records the passes over every DataLoader of this process, from `attach` on.

    begun: called with the iterator of each pass. made_at: returns the user's line that has made a loader. after_read:
    called after each batch."""

    def __init__(
        self,
        timed: Callable[[Callable[..., Any]], Callable[..., Any]],
        begun: Callable[[Any], None],
        made_at: Callable[[object], object],
        after_read: Callable[[], None] = lambda: None,
    ) -> None:
        self.passes: list[Pass] = []
        self.epochs_set = 0
        self.latest: int | None = None  # the pass that was read last
        self._loaders: dict[int, tuple[int, object]] = {}  # id -> (number, the loader, so that its id stays its own)
        self._numbers: dict[object, int] = {}  # what a loader keeps that is made anew in each epoch -> its number
        self._since: set[int] = set()  # the passes that were read since the last forward
        self._datasets: dict[int, tuple[str, object]] = {}
        self._timed, self._begun, self._made_at, self._after_read = timed, begun, made_at, after_read

    def attach(self, hooks: Hooks) -> None:
        """Patches DataLoader's iterators and DistributedSampler."""

        def new_init(init: Any, iterator: Any, loader: Any) -> None:
            init(iterator, loader)
            self._begin(iterator, loader)

        def new_reset(reset: Any, iterator: Any, loader: Any, first_iter: bool = False) -> None:
            reset(iterator, loader, first_iter)
            if not first_iter:
                self._begin(iterator, loader)

        def new_request(request: Any, iterator: Any) -> Any:
            batch = request(iterator)
            self.passes[iterator._samestep].requested.append(
                _indices(batch) if iterator._dataset_kind == dataloader._DatasetKind.Map else None
            )
            return batch

        def new_read(read: Any, iterator: Any) -> Any:
            number = iterator._samestep
            try:
                data = read(iterator)
            except StopIteration:
                self.passes[number].ended, self.passes[number].batch = True, None
                raise
            self._read(number, data)
            self._timed(self._after_read)()
            return data

        def new_set_epoch(set_epoch: Any, sampler: Any, epoch: int) -> None:
            self.epochs_set += 1
            set_epoch(sampler, epoch)

        hooks.attach(ITERATOR, "__init__", new_init)
        hooks.attach(ITERATOR, "_reset", new_reset)
        hooks.attach(ITERATOR, "_next_index", new_request)
        hooks.attach(ITERATOR, "__next__", new_read)
        hooks.attach(DistributedSampler, "set_epoch", new_set_epoch)

    def numbers(self) -> dict[int, int]:
        """Returns the number of each loader, and of its sampler, by their ids."""
        numbers = {key: number for key, (number, _) in self._loaders.items()}
        return {id(attribute_of(loader, "sampler")): number for number, loader in self._loaders.values()} | numbers

    def trained(self, rows: Sequence[str]) -> list[int]:
        """Notes that a micro-batch is trained with the batch that was read last, and with those of other loaders whose
        rows are among the model's. Returns the numbers of their passes."""
        if self.latest not in self._since:
            self._find_batch(rows)
        numbers = [number for number in (self.latest,) if number is not None]
        numbers += [number for number in sorted(self._since) if number not in numbers and self._gave(number, rows)]
        for number in numbers:
            self.passes[number].trained += 1
        self._since.clear()
        return numbers

    def _find_batch(self, rows: Sequence[str]) -> None:
        """Takes for the latest pass the one whose last batch is what is trained: read before an evaluation, which has
        read others since."""
        going_on = [number for number, loader_pass in enumerate(self.passes) if loader_pass.batch is not None]
        if len(going_on) > 1 and rows and not self._is_batch(self.latest, rows):
            self.latest = next((number for number in going_on if self._is_batch(number, rows)), self.latest)

    def _is_batch(self, number: int | None, rows: Sequence[str]) -> bool:
        """Returns whether a model's rows are those of the last batch of a pass, or of a tensor in it."""
        batch = None if number is None else self.passes[number].batch
        leaves = [leaf for leaf in known_leaves(batch) if is_a(leaf, Tensor) and leaf.dim()]
        return any({*rows} <= {*rows_of(part)} for part in (batch, *leaves))

    def trained_datasets(self) -> set[int]:
        """Returns the ids of the datasets that were trained with."""
        return {id(loader_pass.iterator._dataset) for loader_pass in self.passes if loader_pass.trained}

    def evaluated(self) -> None:
        """Notes that what was read is evaluated."""
        self._since.clear()

    def _gave(self, number: int, rows: Sequence[str]) -> bool:
        """Returns whether the last batch of a pass has tensors that are among a model's rows.

        Of the latest pass's own loader each row must be, in another batch than that pass's: a script may look at a
        first batch before it begins an epoch.
        """
        batch, latest = self._last_batch(number), self.latest
        of_model, read = {*rows}, self.passes[number].digests[-len(batch or ()) :]
        if latest is not None and self.passes[number].loader == self.passes[latest].loader:
            return batch != self._last_batch(latest) and not any(of_model.isdisjoint(digests) for digests in read)
        return any(not of_model.isdisjoint(digests) for digests in read)

    def _last_batch(self, number: int) -> list[int] | None:
        """Returns the indices of the batch that a pass has read last."""
        read = self.passes[number].requested[: self.passes[number].read]
        return read[-1] if read else None

    def forget_training(self) -> None:
        """Takes what was trained so far for something else."""
        for loader_pass in self.passes:
            loader_pass.trained = 0

    def _begin(self, iterator: Any, loader: Any) -> None:
        length = length_of(loader.dataset)
        names = [type(attribute_of(loader, name)).__name__ for name in ("batch_sampler", "sampler")]
        sampler = SKIPS if names[0] == SKIPS else names[1]
        iterator._samestep = len(self.passes)
        data = loader.dataset
        if id(data) not in self._datasets:  # as it is now: one that keeps the rows it has read is another one later
            self._datasets[id(data)] = self._timed(identity)(data), data
        dataset = self._datasets[id(data)][0]
        number = self._number(loader, (self._made_at(loader), type(data), dataset, length, loader.batch_size, sampler))
        made = Pass(number, length, loader.batch_size, sampler, iterator, dataset=dataset, workers=loader.num_workers)
        self.passes.append(made)
        self._begun(iterator)

    def _number(self, loader: Any, key: tuple[object, ...]) -> int:
        """Returns a loader's number. One that is made by the same line, of the same dataset, after an earlier one has
        come to its end, is that one in its next epoch."""
        if id(loader) not in self._loaders:
            numbers = [number for number, _ in self._loaders.values()]
            number = self._numbers.get(key, -1) if key[0] else -1
            if not any(known.loader == number for known in self.passes) or not all(
                known.ended for known in self.passes if known.loader == number
            ):
                number = max(numbers, default=-1) + 1
            self._loaders[id(loader)], self._numbers[key] = (number, loader), number
        return self._loaders[id(loader)][0]

    def _read(self, number: int, data: Any) -> None:
        self._timed(self._digest)(self.passes[number], data)
        self.passes[number].read += 1
        self.passes[number].batch = data
        self.latest = number
        self._since.add(number)

    @staticmethod
    def _digest(loader_pass: Pass, data: Any) -> None:
        number = loader_pass.read
        indices = loader_pass.requested[number] if number < len(loader_pass.requested) else None
        rows = len(indices) if indices else 0
        leaves = [leaf for leaf in known_leaves(data) if is_a(leaf, Tensor) and leaf.dim()]
        digests = [digest_rows(leaf, rows) for leaf in leaves if len(leaf) == rows]
        loader_pass.digests += [list(row) for row in zip(*digests)] if digests else [[] for _ in range(rows)]


def length_of(dataset: object) -> int | None:
    """Returns how many rows a dataset has; None where it does not tell."""
    data: Any = dataset
    return answer(lambda: len(data), None) if defines(dataset, "__len__") else None


def identity(dataset: Any) -> str:
    """Returns a digest that tells a rank's own dataset from that of another rank: of the first, the middle and the last
    element of each sequence that it, or what it wraps, holds for its rows (indices of a Subset, paths, tensors). No row
    of it is read."""
    rows = length_of(dataset) or 0
    values = list(attributes_of(dataset).values())
    values += [part for value in values if type(value) in (list, tuple) for part in value if is_a(part, Tensor)]
    sequences = [value for value in values if type(value) in SEQUENCES and attribute_of(value, "ndim") != 0]
    sequences = [value for value in sequences if len(value) == rows]
    ends = [value[index] for value in sequences for index in (0, rows // 2, rows - 1)] if rows else []
    leaves = [
        leaf for leaf in known_leaves(ends) if type(leaf) in PLAIN or is_a(leaf, (Tensor, np.generic, np.ndarray))
    ]
    wrapped = attribute_of(dataset, "dataset")
    if wrapped is not None and (digest := identity(wrapped)):
        leaves.append(digest)
    return digest_rows(leaves, 1)[0] if leaves else ""


def rows_of(data: Any) -> list[str]:
    """Returns digests of the rows of a model's inputs: of all tensors whose first dimension is the first one's."""
    leaves = [leaf for leaf in known_leaves(data) if is_a(leaf, Tensor) and leaf.dim()]
    rows = len(leaves[0]) if leaves else 0
    return digest_rows([leaf for leaf in leaves if len(leaf) == rows], rows) if rows else []


def other_inputs(data: Any) -> list[str]:
    """Returns a digest of each of a model's inputs whose first dimension is not that of its rows."""
    leaves = [leaf for leaf in known_leaves(data) if is_a(leaf, Tensor) and leaf.dim()]
    others = [leaf for leaf in leaves if type(leaf) is Tensor and len(leaf) != len(leaves[0])]
    return [digest_rows([leaf[None]], 1)[0] for leaf in others]


def patch_loaders(
    hooks: Hooks, read: Callable[[Any, Callable[[Any], Any]], Any], length: Callable[[Any, int], int]
) -> None:
    """Calls read(iterator, the original) for each batch, and length(loader, its own) when it is first asked: for a
    recording of the batches, or a replay of them."""
    lengths: dict[int, tuple[int, object]] = {}  # with the loader, so that its id stays its own

    def new_next(following: Any, iterator: Any) -> Any:
        return read(iterator, following)

    def new_len(size: Any, loader: Any) -> int:
        if id(loader) not in lengths:
            lengths[id(loader)] = length(loader, size(loader)), loader
        return lengths[id(loader)][0]

    hooks.attach(ITERATOR, "__next__", new_next)
    hooks.attach(DataLoader, "__len__", new_len)
