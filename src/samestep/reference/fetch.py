"""Reads the reference's rows one by one, collates them, and digests each row's tensors."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from samestep.job import Job, Part
from samestep.reference.schedule import seeded


def fetch(job: Job, rows: list[int], epoch: int, device: str) -> Any:
    """The collated training samples at `rows`; None where there are none."""
    begin_epoch(job.train, epoch)
    read = {i: job.train[i] for i in sorted(rows)}  # in the order in which a stream has them
    samples = [read[i] for i in rows]
    if job.augment:
        samples = [job.augment(s, seeded(job.seed, "augment", epoch, i)) for s, i in zip(samples, rows)]
    return collate(job, samples, device) if samples else None


def begin_epoch(dataset: Any, epoch: int) -> None:
    """Calls the dataset's set_epoch, or that of the dataset inside of subsets, where there is one."""
    while dataset is not None and not hasattr(dataset, "set_epoch"):
        dataset = getattr(dataset, "dataset", None)
    if dataset is not None:
        dataset.set_epoch(epoch)


def collate(job: Job, samples: list[Any], device: str) -> Any:
    """The samples as one batch on `device`."""
    data = (job.collate or torch.utils.data.default_collate)(samples)
    return tree_map_only(torch.Tensor, lambda t: t.to(device), data)


def place(step: int, micro: int, rows: list[int], epoch: int = 0, weight: float | None = None) -> Part:
    """The `Batch.part` of `rows`, for a criterion that reads it."""
    return Part(
        epoch=epoch,
        step=step,
        micro=micro,
        indices=torch.tensor(rows, dtype=torch.int64).numpy(),
        rows=len(rows),
        weight=float(len(rows)) if weight is None else weight,
        share=1.0,
        completes_step=True,
        completes_epoch=False,
    )


def digests(data: Any, rows: int) -> list[str]:
    """A digest of each row, from the bytes of its tensors in the batch's order.

    What has no first dimension of rows (a time-first sequence, a table, a text) counts whole in each row's digest.
    """
    out = []
    for row in range(rows):
        state = hashlib.blake2b(digest_size=6)
        for leaf in tree_leaves(data):
            if isinstance(leaf, Tensor):
                tensor = leaf[row] if leaf.dim() and len(leaf) == rows else leaf
                state.update(bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).tolist()))
            else:
                state.update(repr(leaf).encode())
        out.append(state.hexdigest())
    return out


def random_state(device: str) -> Tensor:
    """The state of the random generator that dropout on `device` draws from."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)
