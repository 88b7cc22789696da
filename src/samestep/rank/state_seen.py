"""Describes the state of a training by sums, which show whether a continued training begins with the same state.

It reads the live model and optimizer. With the checkpoints that it checks it shares only where a shard lies (shards).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from samestep.job.phases import CHECKPOINTED
from samestep.rank.ema import Ema
from samestep.rank.shards import block_of, is_shard, place_of, sharded_like
from samestep.records.record import TensorRecord


class StateOf:
    """The state of one training on this rank."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def seen(self, ema: Ema | None, others: Mapping[str, Any]) -> dict[str, TensorRecord]:
        """Returns the sums of 'weights of NAME', 'KEY of NAME' of the optimizer, 'average of NAME', 'buffer NAME', and
        'PART KEY' of the others, name -> what has a state dict. 'optimizer of NAME' is empty: NAME may have a state.
        """
        seen = {name: _sums(tensor) for name, tensor in self._tensors(ema)}
        for part, of_part in others.items():
            for path, value in tree_flatten_with_path(of_part.state_dict())[0] if of_part is not None else ():
                if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
                    seen[f"{part} {keystr(path)}"] = _sums(torch.as_tensor(value))
        return seen

    def buffers(self) -> dict[str, TensorRecord]:
        """Returns the sums of each 'buffer NAME'."""
        return {f"buffer {name}": _sums(buffer) for name, buffer in self.model.named_buffers()}

    def _tensors(self, ema: Ema | None) -> Iterator[tuple[str, Tensor]]:
        named = {name.replace(CHECKPOINTED, ""): each for name, each in self.model.named_parameters()}
        names = {id(parameter): name for name, parameter in named.items()}
        for name, parameter in named.items():
            yield f"weights of {name}", parameter
        for name, buffer in self.model.named_buffers():
            yield f"buffer {name}", buffer
        inner: Any = getattr(self.optimizer, "optim", None)  # ZeRO's, which has this rank's part of the state
        optimizer = inner if isinstance(inner, Optimizer) else self.optimizer
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            name = names.get(id(parameter), "")
            if not name:
                continue  # libraries may replace the parameters by flat copies
            yield f"optimizer of {name}", torch.empty(0)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | int | float):
                    yield f"{key} of {name}", torch.as_tensor(value)
        for name, average, parameter in ema.named(self.model) if ema else ():
            yield f"average of {name}", sharded_like(average, parameter) if is_shard(parameter) else average


def _sums(tensor: Tensor) -> TensorRecord:
    """Returns the sums over this rank's piece of a tensor. No rank asks another."""
    block = block_of(tensor)
    place = torch.zeros((), dtype=torch.float64, device=block.device)
    _, offset = place_of(tensor)
    step = tensor.numel()
    for size, here, first in zip(tensor.shape, block.shape, offset):
        step //= max(1, size)
        index = torch.arange(first, first + here, dtype=torch.float64, device=block.device)
        place = place.unsqueeze(-1) + index * step
    values = block.to(torch.float64).nan_to_num()
    mixed = float((values * torch.cos(place)).sum())
    return TensorRecord(block.numel(), tensor.numel(), float(values.abs().sum()), mixed)
