"""Copies batches to the GPU while the previous step still runs: the pipeline's last stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.job.walk import mapped_tensors


def to_device(data: Any, device: str) -> Any:
    """Returns `data` with every tensor on `device`; unchanged if that is the CPU."""
    if device == "cpu":
        return data
    return mapped_tensors(lambda tensor: tensor.to(device, non_blocking=True), data)


@dataclass(frozen=True)
class PendingCopy:
    """Data that is being copied to the GPU. copied: recorded after the copy; None where nothing is copied."""

    data: Any
    copied: torch.cuda.Event | None = None

    def wait(self) -> Any:
        """Returns the data, and makes the current CUDA stream wait for the copy. Does not block Python.

        The memory belongs to the copying stream; record_stream keeps it allocated until the current one has used it.
        """
        if self.copied is not None:
            training = torch.cuda.current_stream()
            training.wait_event(self.copied)
            mapped_tensors(lambda tensor: tensor.record_stream(training), self.data)
        return self.data


class Gather:
    """A pipeline stage that copies an item's tensors to `device` through pinned memory, on its own CUDA stream.

    On the CPU it copies nothing. Source: "CUDA semantics: use pinned memory buffers", PyTorch's notes;
    https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.stream = None if device == "cpu" else torch.cuda.Stream(device)

    def __call__(self, data: Any) -> PendingCopy:
        if self.stream is None:
            return PendingCopy(data)
        # The device too: without it, pinning in a thread would open a context on GPU 0 from every rank.
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            on_gpu = mapped_tensors(self._copied, data)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        return PendingCopy(on_gpu, copied)

    def _copied(self, tensor: Tensor) -> Tensor:
        # torch's pinned-memory allocator records the copy, and does not reuse the buffer until it is done.
        return (tensor if tensor.is_cuda else tensor.pin_memory()).to(self.device, non_blocking=True)
