"""Digests of rows and weights: two trainings that read the same rows, or start from the same weights, have the same."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from samestep.job.walk import leaves_of
from samestep.rank.weights import StateDict


def digest_rows(data: Any, rows: int) -> list[str]:
    """Returns a digest of each of the first `rows` rows of a batch, computed from the tensors' bytes.

    A tensor whose first dimension is not `rows` is part of every row's digest, and so is every value that is no tensor.
    """
    hashes = [hashlib.blake2b(digest_size=6) for _ in range(rows)]
    for leaf in leaves_of(data):
        tensor = leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else None
        if tensor is not None and tensor.dim() and len(tensor) == rows:
            pieces = [_bytes(row) for row in tensor]
        else:
            pieces = [repr(leaf).encode() if tensor is None else _bytes(tensor)] * rows
        for piece, state in zip(pieces, hashes):
            state.update(piece)
    return [state.hexdigest() for state in hashes]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def full_state_dict(model: nn.Module) -> StateDict:
    """Returns a module's state dict, with FSDP's shards gathered on every rank."""
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}


def digest_state(model: nn.Module) -> str:
    """Returns a digest of a module's parameters and buffers, in the order of its state dict."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in (value for value in full_state_dict(model).values() if isinstance(value, Tensor)):
        state.update(_bytes(tensor.detach().cpu().contiguous()))
    return state.hexdigest()
