"""The last stage before training: a batch onto the GPU, while the step before it still runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only  # torch's own walk through tuples, lists and dicts of tensors


def to_device(data: Any, device: str) -> Any:
    """`data` with every tensor on `device`; it is returned as it is when that is the CPU."""
    if device == "cpu":
        return data
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), data)


@dataclass(frozen=True)
class Coming:
    """Data whose copy to the GPU is under way. copied: is reached when it is there; None where nothing is copied."""

    data: Any
    copied: torch.cuda.Event | None = None

    def arrive(self) -> Any:
        """The data, for the stream that trains: what is queued there from now on waits for the copy, Python does not.

        The memory belongs to the side stream; record_stream keeps it from being given away before training is done.
        """
        if self.copied is not None:
            training = torch.cuda.current_stream()
            training.wait_event(self.copied)
            tree_map_only(Tensor, lambda tensor: tensor.record_stream(training), self.data)
        return self.data


class Gather:
    """A stage: copies the tensors of its item to `device` through pinned memory, on a stream of its own.

    On the CPU nothing is copied. Source: "CUDA semantics: use pinned memory buffers", PyTorch's notes;
    https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.stream = None if device == "cpu" else torch.cuda.Stream(device)

    def __call__(self, data: Any) -> Coming:
        if self.stream is None:
            return Coming(data)
        # The device, too: pinning in a thread that names none would open a context on GPU 0 from every rank.
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            on_gpu = tree_map_only(Tensor, self._copied, data)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        return Coming(on_gpu, copied)

    def _copied(self, tensor: Tensor) -> Tensor:
        # The allocator of pinned memory notes the copy, and gives the buffer to nobody else until it is done.
        return (tensor if tensor.is_cuda else tensor.pin_memory()).to(self.device, non_blocking=True)
