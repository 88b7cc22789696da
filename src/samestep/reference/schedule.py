"""The reference's schedule: which rows each replica trains at a step. Written in another way than data/schedule.py."""

from __future__ import annotations

import hashlib
from math import ceil

import torch

from samestep.engine import Layout
from samestep.job import Job


def per_epoch(job: Job) -> int:
    """Optimizer steps of one epoch."""
    length, batch = len(job.train), job.global_batch
    return length // batch if job.last == "drop" else ceil(length / batch)


def step_rows(job: Job, layout: Layout, step: int) -> list[list[list[int]]]:
    """[micro-batch][replica] -> sample indices of this step."""
    epoch, number = step // per_epoch(job), step % per_epoch(job)
    order = list(range(len(job.train)))
    if job.shuffle:
        order = torch.randperm(len(order), generator=seeded(job.seed, "order", epoch)).tolist()
    rows = order[number * job.global_batch :][: job.global_batch]
    processes = 1 if layout.split == "chunk" else layout.replicas
    most = ceil(job.global_batch / processes)
    count = 1
    while job.micro_batch and ceil(most / count) > job.micro_batch:
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


def _deal(rows: list[int], hands: int) -> list[list[int]]:
    """Shares rows out: the counts as if dealt one by one like cards, each hand's rows one after the other."""
    counts = [0] * hands
    for i in range(len(rows)):
        counts[i % hands] += 1
    rest = list(rows)
    dealt = []
    for count in counts:
        dealt.append(rest[:count])
        rest = rest[count:]
    return dealt


def weight(job: Job, rows: list[int]) -> float:
    """The rows' weight in the mean."""
    return float(sum(job.weight(i) if job.weight else 1 for i in rows))


def seeded(*path: int | str) -> torch.Generator:
    """A random generator for a path such as (seed, 'order', epoch)."""
    digest = hashlib.blake2b("/".join(str(p) for p in path).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") // 2)
