"""A dataset's fingerprint, by which other data are recognised: its length, its labels, and digests of some rows.

    fingerprint(job.train)      -> Fingerprint(length=1600, rows={0: '8d1f…', 106: …, 1599: …}, …)

Each row is read twice, with the same random numbers: a random crop is then the same one, and a row that still changes
is left out. Reading must not change the training: a dataset may draw from a generator of its own, or open its files at
the first read. So it happens in a process that is forked for it; in this one only where the dataset is known to do
nothing but index tensors. How long a row takes decides nothing: the same rows are looked at on every machine.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from samestep.bounds import ROW_APART
from samestep.data.arrays import Arrays
from samestep.data.loader import fetch
from samestep.data.part import Part, PartInBatches, PartOfArrays
from samestep.data.schedule import schedule_of
from samestep.data.stream import is_stream
from samestep.errors import Refused, UserError, say
from samestep.job import Job
from samestep.job.checks import nested
from samestep.job.walk import leaves_of
from samestep.message import message
from samestep.world import World
from samestep.world.processes import die_with_parent

ROWS = 16  # that are looked at, the first and the last among them
FIRST_ROWS = 4  # of a stream, which would have to be read up to the others
# For one row: a forked process may wait for a lock that a thread of this one holds, and would do so for ever.
SILENT_S = 120.0
COLLATED = -1  # in the place of a row: the first two, augmented and collated
PLAIN = (TensorDataset, Arrays, Subset, Part, PartInBatches, PartOfArrays)  # reading them changes nothing


@dataclass(frozen=True)
class Fingerprint:
    """What a dataset holds. rows: index -> digest. changing: how many of the rows that were read are others when they
    are read again. labels: a digest of the classes' names and all labels. collated: of two rows; '': it changes."""

    length: int
    rows: dict[int, str]
    changing: int = 0
    labels: str = ""
    collated: str = ""


def fingerprint(job: Job) -> Fingerprint:
    """Returns the fingerprint of `job.train`. An error of the dataset leaves out its rows: the training raises it."""
    dataset = job.train
    length = len(dataset)
    plain = all(type(wrapped) in PLAIN for wrapped in nested(dataset)) and not (job.collate or job.augment)
    if plain or sys.platform != "linux":
        with _generators_kept():
            pairs = list(_digests(job, length))
    else:
        pairs = _digests_of_fork(job, length)
    rows = {index: digest for index, digest in pairs if digest and index != COLLATED}
    changing = sum(not digest for index, digest in pairs if index != COLLATED)
    return Fingerprint(length, rows, changing, _labels(dataset), dict(pairs).get(COLLATED, ""))


def sampled_rows(length: int) -> list[int]:
    """Returns the rows that are looked at, spread evenly: the first, the last, then those between by halves."""
    spread = sorted({index * (length - 1) // (ROWS - 1) for index in range(ROWS)})
    order = [0, len(spread) - 1]
    step = len(spread)
    while step > 1:
        step = (step + 1) // 2
        order += range(step, len(spread), step)
    return [spread[place] for place in dict.fromkeys(order)]


def _digests(job: Job, length: int) -> Iterator[tuple[int, str]]:
    """Yields (row, digest) in the order in which they are read; '': the row changes. An error ends it."""
    indices = list(range(min(length, FIRST_ROWS))) if is_stream(job.train) else sampled_rows(length)
    with suppress(Exception):
        for index in indices:
            yield index, _twice(partial(fetch, job.train, [index]), index)
        if job.collate or job.augment:
            yield COLLATED, _twice(partial(_collated, job, min(2, length)), 0)


def _twice(read: Any, seed: int) -> str:
    """Returns the digest of what `read()` returns; '' where it returns something else the second time."""
    digests = []
    for _ in range(2):
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)  # this one alone: a GPU's would be initialised
        digests.append(digest_of(read()))
    return digests[0] if digests[0] == digests[1] else ""


def _collated(job: Job, count: int) -> Any:
    samples = fetch(job.train, list(range(count)))
    if job.augment:
        samples = [job.augment(sample, torch.Generator().manual_seed(0)) for sample in samples]
    return (job.collate or default_collate)(samples)


def _digests_of_fork(job: Job, length: int) -> list[tuple[int, str]]:
    """Returns what a forked process yields of _digests, until it has ended. Says so of one that has to be ended."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_digests, args=(sender, job, length))
    process.start()
    sender.close()
    pairs: list[tuple[int, str]] = []
    with suppress(EOFError, OSError):
        while receiver.poll(SILENT_S):
            index, digest = json.loads(receiver.recv_bytes(1 << 10))
            pairs.append((index, digest))
        say(message("sample_was_not_read_by_a_fork", seconds=SILENT_S, read=len(pairs)))
    process.kill()
    process.join()
    receiver.close()
    return pairs


def _send_digests(sender: Any, job: Job, length: int) -> None:
    die_with_parent()
    for pair in _digests(job, length):
        sender.send_bytes(json.dumps(pair).encode())


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restores the states of Python's, numpy's and torch's global generators after the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def digest_of(sample: Any) -> str:
    """Returns a digest of a sample's tensors, arrays, images, numbers and texts, as 'hash sum magnitude'.

    Other objects are left out: their repr() may hold addresses. Of floating-point numbers it holds a sum with weights,
    not bits: another kind of processor rounds otherwise. See `is_same_row`.
    """
    state, total, magnitude = hashlib.blake2b(digest_size=8), 0.0, 0.0
    for leaf in leaves_of(sample):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().float().numpy() if leaf.is_floating_point() else leaf.detach().cpu().numpy()
        elif hasattr(leaf, "__array_interface__"):  # a PIL image
            leaf = np.asarray(leaf)
        elif isinstance(leaf, float):
            leaf = np.float64(leaf)
        if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind == "f":
            state.update(repr(leaf.shape).encode())
            values = np.ravel(leaf).astype(np.float64)
            if not (finite := np.isfinite(values)).all():  # in the hash: in a sum they would hide all other values
                kinds = np.nan_to_num(np.where(finite, 0, values), nan=1, posinf=2, neginf=3)
                state.update(kinds.astype(np.uint8).tobytes())
                values = np.where(finite, values, 0)
            total += float(values @ np.cos(np.arange(len(values), dtype=np.float64)))
            magnitude += float(np.abs(values).sum())
        elif isinstance(leaf, np.ndarray | np.generic):
            state.update(np.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, str | bytes | int):
            state.update(repr(leaf).encode())
    return f"{state.hexdigest()} {total:.9g} {magnitude:.9g}"


def is_same_row(digest: str, second: str) -> bool:
    """Returns whether two digests are of the same row, within the rounding of another kind of processor."""
    (bits, total, magnitude), (other_bits, other_total, other_magnitude) = digest.split(), second.split()
    bound = ROW_APART * max(float(magnitude), float(other_magnitude))
    return bits == other_bits and abs(float(total) - float(other_total)) <= bound


def _labels(dataset: Any) -> str:
    """Returns a digest of the names of an image folder's classes, and of every row's label; '' where there are none."""
    state, found = hashlib.blake2b(digest_size=8), False
    for wrapped in nested(dataset):
        values = getattr(wrapped, "__dict__", {})
        labels = values.get("targets", [pair[-1] for pair in values.get("paths", []) if isinstance(pair, tuple)])
        with suppress(Exception):
            numbers = np.asarray(labels)
            if numbers.dtype.kind in "iu" and len(numbers) == len(wrapped):
                state.update(np.ascontiguousarray(numbers, dtype=np.int64).tobytes())
                state.update(repr(list(values.get("classes", []))).encode())
                found = True
    return state.hexdigest() if found else ""


def check_same_data(job: Job, world: World, *, training: bool = True) -> Mapping[str, Fingerprint]:
    """Compares the datasets' lengths, some samples, and an order of the job's own, between the ranks.

    Compares nothing with one rank or without an open process group, nor samples that change each time they are read.
    training: also look at the training's dataset. Returns this rank's fingerprints: 'training', 'evaluation'. Raises
    UserError where a rank differs from rank 0.
    """
    jobs = {"training": job} if training else {}
    if job.evaluation is not None:
        in_order = replace(job, train=job.evaluation, order=None, carry_state=False, last="keep")
        jobs["evaluation"] = replace(in_order, collate=None, augment=None)
    fingerprints = {name: fingerprint(of_dataset) for name, of_dataset in jobs.items()}
    if world.size > 1 and dist.is_initialized():
        for name, seen_data in fingerprints.items():
            _compare_rows(name, seen_data, world, of_stream=is_stream(jobs[name].train))
        if training:
            _compare_orders(job, world)
    return fingerprints


def _compare_rows(name: str, own_data: Fingerprint, world: World, *, of_stream: bool) -> None:
    """Compares a dataset between the ranks. name: of the dataset, for the error. of_stream: whether it is one."""
    of_rank = gather_from_ranks((own_data.length, own_data.rows), world)
    dataset = message("training_goes_on" if name == "training" else "evaluation_goes_on")
    hint = message("streams_must_be_the_same" if of_stream else "jobs_must_be_the_same")
    for rank, (length, digests) in enumerate(of_rank):
        first_length, first = of_rank[0]
        if length != first_length:
            counts = {"samples": length, "first": first_length}
            raise Refused(message("rank_has_other_samples", rank=rank, dataset=dataset, hint=hint, **counts))
        for index, digest in digests.items():
            if not is_same_row(digest, first.get(index, digest)):
                raise Refused(message("rank_reads_other_values", rank=rank, dataset=dataset, sample=index, hint=hint))


def _compare_orders(job: Job, world: World) -> None:
    """Compares the first epoch's order between the ranks, where it is the job's own."""
    if job.order is None:
        return
    order = schedule_of(job, 1).order(0)
    digests = gather_from_ranks(hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest(), world)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UserError(message("rank_has_another_order", rank=rank))


def gather_from_ranks(value: Any, world: World) -> list[Any]:
    """Returns every rank's `mine`, in rank order, on every rank. Needs an open process group when world.size > 1."""
    of_rank: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(of_rank, value)
    return of_rank
