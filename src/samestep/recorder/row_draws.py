"""Random numbers that a script draws for its rows: in its datasets, and between a loader and the model.

A generator that several ranks, or several workers of a loader, draw from alike gives them the same noise. Its state is
kept as a digest, and only where numbers are drawn for each row: what the ranks are to have in common, such as a batch's
size, or an order of all rows, is none. Of what a dataset draws the second batch of each process is noted, as in
the first one an IterableDataset may order its files by a seed of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as fetchers

from samestep.job.foreign import attributes_of, is_a
from samestep.rank.hooks import Hooks
from samestep.recorder.random_numbers import Randoms, digest, patch_draws, patch_shares, torch_state
from samestep.records.files import replace_by
from samestep.records.script import FetchDraws
from samestep.world.regular_files import read_regular, remove_file

NOTED = 1  # the number of the batch that is noted
FEW_WORDS = 8  # words of 32 bits that a few numbers of a batch take, such as MixUp's coefficient
WORDS_OF_STREAM = 4  # words that a row of an IterableDataset takes: fewer choose a row from a buffer
MOST_TWISTS = 256  # the most twists, of 624 words each
DEPTH, WIDTH = 4, 16  # how deep in a dataset, and how far in its lists, generators are looked for
FILE, MOST_BYTES = "draws-rank{}-{}-{}.json", 1 << 20
FETCHERS = (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher)


class RowDraws:
    """Notes what one rank, and its loaders' workers, draw for their rows. beside: of each step, the digest of a
    generator's state before it was drawn from between a loader and the model; '' where none was."""

    def __init__(self, folder: Path, rank: int, in_model: Randoms) -> None:
        self.beside: list[str] = []
        self._folder, self._rank, self._in_model = folder, rank, in_model
        self._fetched: dict[tuple[int, int], list[str]] = {}  # (id of the dataset, worker) -> states
        self._begun, self._inside = False, False  # whether a batch was read; whether a model or a dataset draws
        self._draws: list[tuple[Tensor, str]] = []  # (numbers, the state before) since the latest batch or forward
        self._streams: dict[int, list[str]] | None = None  # of the batch that is noted: generator -> states
        self._at_read: list[Twister] = []

    def attach(self, hooks: Hooks) -> None:
        """Patches torch's functions that draw, and what reads from datasets; workers that are forked inherit it."""
        patch_draws(hooks, self._draw)
        patch_shares(hooks, self._share)
        for kind in FETCHERS:
            hooks.attach(kind, "fetch", self._fetch)

    def begin(self) -> None:
        """Begins a batch. Called after each batch of a loader is read."""
        self._begun, self._draws, self._at_read = True, [], twisters()

    def train(self, step: int, rows: int, inputs: Any = ()) -> None:
        """Notes a training forward of so many rows. Called before each one. inputs: what the model is given."""
        given = [value for value in tree_leaves(inputs) if is_a(value, Tensor)]
        states = [
            state
            for numbers, state in self._draws
            if len(numbers) == rows > 1 and not any(_is_piece(value, numbers) for value in given)
        ]
        states += drawn_twisters(self._at_read, max(rows, FEW_WORDS))
        self.beside += [""] * (step + 1 - len(self.beside))
        self.beside[step] = self.beside[step] or next(iter(states), "")
        self._begun, self._at_read = True, []

    def around_forward(self, call: Callable[[], Any]) -> Any:
        """Calls a model. What it draws is no row's noise."""
        outside, self._inside = self._inside, True
        try:
            return call()
        finally:
            self._inside, self._draws = outside, []

    def fetched(self, datasets: set[int]) -> list[FetchDraws]:
        """Returns what was noted of these datasets, by their ids."""
        for path in self._folder.glob(FILE.format(self._rank, "*", "*")):
            _, _, dataset, worker = path.stem.split("-")
            self._fetched[int(dataset), int(worker)] = json.loads(read_regular(path, MOST_BYTES))
            remove_file(path)
        return [
            FetchDraws(worker, states) for (dataset, worker), states in self._fetched.items() if dataset in datasets
        ]

    def _draw(self, call: Any) -> Tensor:
        generator = call.keywords.get("generator")
        if self._streams is None and (self._inside or not self._begun):
            return self._in_model.draw(call)
        state = digest(generator.get_state().numpy().tobytes()) if generator is not None else torch_state()
        numbers: Tensor = call()
        if self._streams is not None:
            self._streams.setdefault(id(generator), []).append(state)
        elif numbers.dim():
            self._draws.append((numbers, state))
        return numbers

    def _share(self, tensor: Tensor) -> None:
        self._in_model.share(tensor)
        self._draws = [(numbers, state) for numbers, state in self._draws if numbers.shape != tensor.shape]

    def _fetch(self, fetch: Any, fetcher: Any, index: Any) -> Any:
        number = fetcher.__dict__.setdefault("_samestep", 0)
        fetcher._samestep += 1
        outside, self._inside = self._inside, True
        try:
            if number != NOTED:
                return fetch(fetcher, index)
            return self._note(functools.partial(fetch, fetcher, index), fetcher, index)
        finally:
            self._inside = outside

    def _note(self, fetch: Callable[[], Any], fetcher: Any, index: Any) -> Any:
        rows = len(index) if is_a(index, list | tuple) else 1
        is_stream = is_a(fetcher, fetchers._IterableDatasetFetcher)
        before = twisters()
        held = [] if is_stream else [*generators(fetcher.dataset)]
        held_before = [state_of(generator) for generator in held]
        self._streams = {}
        try:
            return fetch()
        finally:
            streams, self._streams = self._streams, None
            # A dataset that seeds anew for each row, as by its index, draws from one state for one row.
            states = [stream[0] for stream in streams.values() if len({*stream}) >= max(rows, 2)]
            states += drawn_twisters(before, rows * (WORDS_OF_STREAM if is_stream else 1))
            states += [state for state, generator in zip(held_before, held) if state_of(generator) != state]
            self._keep(id(fetcher.dataset), states)

    def _keep(self, dataset: int, states: list[str]) -> None:
        worker = get_worker_info()
        if worker is None:
            self._fetched.setdefault((dataset, 0), states)
            return
        path = self._folder / FILE.format(self._rank, dataset, worker.id)
        if not path.exists():  # in an epoch before
            with contextlib.suppress(OSError):  # a full disk is no failure of the user's dataset
                replace_by(path, lambda file: file.write(json.dumps(states).encode()), sync=False)


def _is_piece(given: Tensor, numbers: Tensor) -> bool:
    """Returns whether what a model is given is cut out of drawn numbers: a rank's part of a sequence, which all ranks
    draw."""
    if given.layout != torch.strided or numbers.layout != torch.strided or given.numel() >= numbers.numel():
        return False
    return given.untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr()


# Generators


@dataclass(frozen=True)
class Twister:
    """The state of a Mersenne Twister: numpy's global generator, or Python's. place: of its next word in the key."""

    name: str
    key: bytes
    place: int

    def words_until(self, after: Twister) -> int:
        """Returns how many words were drawn since; 0 where it was seeded anew, or drawn from too often to know."""
        if after.key == self.key:
            return max(after.place - self.place, 0)
        twin = np.random.MT19937()
        key = np.frombuffer(self.key, np.uint32)
        twin.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": self.place}}
        for twists in range(MOST_TWISTS):
            twin.random_raw(624 if twists else 625 - self.place)
            state: Any = twin.state["state"]
            if state["key"].astype(np.uint32).tobytes() == after.key:
                return 624 * (twists + 1) - self.place + after.place
        return 0


def twisters() -> list[Twister]:
    """Returns the states of numpy's global generator and of Python's."""
    words = random.getstate()[1]
    found = [Twister("python", np.array(words[:-1], np.uint32).tobytes(), words[-1])]
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        key = state["state"]["key"].astype(np.uint32).tobytes()
        found.append(Twister("numpy", key, int(state["state"]["pos"])))
    return found


def drawn_twisters(before: list[Twister], words: int) -> list[str]:
    """Returns the digests of those from which at least so many words were drawn since."""
    if not before:
        return []
    now = {twister.name: twister for twister in twisters()}
    drawn = [known for known in before if known.name in now and known.words_until(now[known.name]) >= words]
    return [digest(f"{known.name} {known.place}".encode() + known.key) for known in drawn]


def generators(thing: Any, depth: int = 0) -> Iterator[Any]:
    """Yields the generators of numpy and Python that a dataset, its transforms, or what it wraps holds."""
    if is_a(thing, np.random.Generator | np.random.RandomState | random.Random):
        if not is_a(thing, random.SystemRandom):
            yield thing
    elif depth < DEPTH and not is_a(thing, type | ModuleType | Tensor | np.ndarray):
        held = thing[:WIDTH] if is_a(thing, list | tuple) else attributes_of(thing).values()
        for value in [*held]:
            yield from generators(value, depth + 1)


def state_of(generator: Any) -> str:
    """Returns the digest of a generator's state."""
    if is_a(generator, random.Random):
        return digest(pickle.dumps(generator.getstate()))
    state = generator.get_state() if is_a(generator, np.random.RandomState) else generator.bit_generator.state
    return digest(pickle.dumps(state))
