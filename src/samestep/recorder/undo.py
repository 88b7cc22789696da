"""Removes the recorder's patches from torch, for a process that goes on after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import dataloader
from torch.utils.data.distributed import DistributedSampler

ITERATOR: Any = dataloader._BaseDataLoaderIter
PATCHED: list[tuple[Any, str]] = [
    (nn.Module, "__call__"),
    (nn.Module, "zero_grad"),
    (Optimizer, "zero_grad"),
    (torch, "save"),
    (torch.autograd, "backward"),
    (torch.autocast, "__enter__"),
    *((of, name) for of in (nn.utils, nn.utils.clip_grad) for name in ("clip_grad_norm_", "clip_grad_value_")),
    (torch.amp.GradScaler, "unscale_"),
    (LRScheduler, "__init__"),
    (DistributedSampler, "set_epoch"),
    *((ITERATOR, name) for name in ("__init__", "_reset", "_next_index", "__next__")),
]


class Patches:
    """What torch's patched places held before. Make it before the patches, and call installed() after them."""

    def __init__(self) -> None:
        self._before = [getattr(of, name) for of, name in PATCHED]
        self._ours: list[Any] = []

    def installed(self) -> None:
        """Notes what the places hold now."""
        self._ours = [getattr(of, name) for of, name in PATCHED]

    def undo(self) -> None:
        """Puts back what was there; a place that another library has patched since stays as it is."""
        for (of, name), before, ours in zip(PATCHED, self._before, self._ours):
            if getattr(of, name) is ours:
                setattr(of, name, before)
