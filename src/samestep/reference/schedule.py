"""The reference's schedule: which rows each replica trains at a step. Written in another way than data/schedule.py."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from math import ceil

import torch

from samestep.engine import Layout
from samestep.job import ByLength, Job, Lanes, Weighted


def per_epoch(job: Job) -> int:
    """Optimizer steps of one epoch: a batch takes one of each phase."""
    length, batch = len(order(job, 0)) if job.order is not None else len(job.train), job.global_batch
    batches = length // batch if job.last == "drop" else ceil(length / batch)
    return batches * (len(job.phases) or 1)


def step_rows(job: Job, layout: Layout, step: int) -> list[list[list[int]]]:
    """[micro-batch][replica] -> sample indices of this step."""
    epoch, number = step // per_epoch(job), step % per_epoch(job)
    if job.phases:
        number = number // len(job.phases)
    rows = order(job, epoch)[number * job.global_batch :][: job.global_batch]
    processes = 1 if layout.split == "chunk" else layout.replicas
    most = ceil(job.global_batch / processes)
    count = 1
    while count < layout.micro_batches or (job.micro_batch and ceil(most / count) > job.micro_batch):
        count += 1
    shares = [_deal(of_process, count) for of_process in _deal(rows, processes)]
    by_micro = [[share[micro] for share in shares] for micro in range(count)]
    if layout.split == "even":
        return by_micro
    chunks = []
    for (rows_here,) in by_micro:
        size = ceil(len(rows_here) / layout.replicas) or 1
        chunks.append([rows_here[i * size : (i + 1) * size] for i in range(layout.replicas)])
    return chunks


class RepeatedRow(int):
    """A row that has come before in its epoch, `times` times."""

    times: int


def order(job: Job, epoch: int) -> list[int]:
    """The sample indices of an epoch, in the order in which they are trained."""
    samples, generator = len(job.train), seeded(job.seed, "order", epoch)
    if not job.shuffle:
        return list(range(samples))
    if job.order is None:
        indices: list[int] = torch.randperm(samples, generator=generator).tolist()
        return indices
    if isinstance(job.order, ByLength):
        return _like_lengths(job.order, job.global_batch, generator)
    if isinstance(job.order, Lanes):
        steps = samples // job.global_batch
        rows = [lane * steps + step for step in range(steps) for lane in range(job.global_batch)]
        return rows + list(range(len(rows), samples))
    if isinstance(job.order, Weighted):
        ends = list(accumulate(map(float, job.order.weights)))
        draws = torch.rand(job.order.num_samples or samples, dtype=torch.float64, generator=generator).tolist()
        rows = [min(bisect_right(ends, draw * ends[-1]), samples - 1) for draw in draws]
    else:
        rows = [int(row) for row in job.order(epoch, generator)]
    met: Counter[int] = Counter()
    for place, row in enumerate(rows):
        if met[row]:
            again = rows[place] = RepeatedRow(row)
            again.times = met[row]
        met[row] += 1
    return rows


def _like_lengths(lengths_order: ByLength, batch: int, generator: torch.Generator) -> list[int]:
    """Batches from the buckets, one bucket after the other, shuffled; at the end the rows of the incomplete batch."""
    samples = len(lengths_order.lengths)
    bucket_of = {}
    for place, row in enumerate(sorted(range(samples), key=lambda row: lengths_order.lengths[row])):
        bucket_of[row] = place * lengths_order.buckets // samples
    shuffled = torch.randperm(samples, generator=generator).tolist()
    count = samples // batch
    buckets: dict[int, list[int]] = {}
    for row in shuffled[: count * batch]:
        buckets.setdefault(bucket_of[row], []).append(row)
    line = [row for bucket in sorted(buckets) for row in buckets[bucket]]
    batches = [line[n * batch : (n + 1) * batch] for n in torch.randperm(count, generator=generator).tolist()]
    return [row for rows in batches for row in rows] + shuffled[count * batch :]


def _deal(rows: list[int], hands: int) -> list[list[int]]:
    """Shares rows out: the counts as if dealt one by one like cards, each hand's rows one after the other."""
    counts = [0] * hands
    for i in range(len(rows)):
        counts[i % hands] += 1
    remaining = list(rows)
    dealt = []
    for count in counts:
        dealt.append(remaining[:count])
        remaining = remaining[count:]
    return dealt


def weight(job: Job, rows: list[int]) -> float:
    """The rows' weight in the mean, where their indices decide it."""
    return float(sum(job.weight(i) if job.weight else 1 for i in rows))


def seeded(*path: int | str) -> torch.Generator:
    """A random generator for a path such as (seed, 'order', epoch)."""
    digest = hashlib.blake2b("/".join(str(p) for p in path).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") // 2)
