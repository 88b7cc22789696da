"""Compares the ranks' replicas of the weights (--check-replicas), by a digest of their bits."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import LostPeer, ReplicasDiffer
from samestep.rank.shards import is_shard
from samestep.world import World

BLOCK = 1 << 17  # elements at once: a digest needs 24 bytes for each, which fit into a core's cache
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # factors that mix bits, of splitmix64
KEPT = (1 << 62) - 1  # the bits of a digest: its negative must be a number, too


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that every rank holds whole; those that FSDP or DeepSpeed shard have no replicas.

    Buffers are left out: ranks keep their own (Layout.buffers), or get rank 0's before the next forward pass.
    """
    named = model.named_parameters()
    return {name: p.detach() for name, p in named if not is_shard(p) and not hasattr(p, "ds_id")}


def digests(tensors: dict[str, Tensor]) -> list[int]:
    """Returns a digest of each tensor's bits, computed where the tensor is. One changed bit changes it."""
    return torch.stack([_digest(tensor) for tensor in tensors.values()]).tolist() if tensors else []


def _digest(tensor: Tensor) -> Tensor:
    """Adds up the elements' bits, each mixed with its place. A scalar of int64."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.contiguous().reshape(-1).view(INTEGERS[plain.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    places = torch.arange(min(BLOCK, len(bits)), device=tensor.device).mul_(ODD[1])
    for first in range(0, len(bits), BLOCK):
        block = bits[first : first + BLOCK]
        mixed = places[: len(block)] + first * ODD[1] % KEPT
        mixed += block
        mixed *= ODD[0]
        mixed ^= mixed >> 29
        mixed *= ODD[2]
        total += mixed.sum()
    return total & KEPT


class ReplicaCheck:
    """Compares the replicas every `every` steps, and at the end of the training. Every rank must call it alike."""

    def __init__(self, world: World, every: int) -> None:
        self.world, self.every = world, every
        self._checked = 0  # steps done at the latest check

    def is_due(self, done: int) -> bool:
        """Returns whether the replicas are compared after `done` steps."""
        return self.world.size > 1 and done % self.every == 0

    def check(self, model: nn.Module, done: int) -> None:
        """Compares the replicas with one all-reduce of two numbers.

        Where they differ, a rank that has drifted raises ReplicasDiffer and the others LostPeer; both name the first
        tensor.
        """
        if self.world.size == 1 or done == self._checked:
            return
        self._checked = done
        tensors = whole_parameters(model)
        own_digests = torch.tensor(digests(tensors), dtype=torch.int64)
        whole = int(_digest(own_digests))
        greatest = torch.tensor([whole, -whole], device=self.world.device)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        high, low = greatest.tolist()
        if high != -low:
            self._raise(list(tensors), own_digests.to(self.world.device), done)

    def _raise(self, names: list[str], own_digests: Tensor, done: int) -> None:
        gathered = [torch.empty_like(own_digests) for _ in range(self.world.size)]
        dist.all_gather(gathered, own_digests)
        of_rank = torch.stack(gathered).cpu()  # shape [ranks, tensors]
        differs = [number for number in range(len(names)) if len(of_rank[:, number].unique()) > 1]
        of_first: list[int] = of_rank[:, differs[0]].tolist()
        common = Counter(of_first).most_common(1)[0][0]  # of two ranks rank 0's
        odd = [rank for rank, digest in enumerate(of_first) if digest != common]
        ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
        sentence = (
            f"the replicas have drifted apart by step {done - 1}: {names[differs[0]]} on {ranks} is not what the other "
            f"ranks have ({len(differs)} of {len(names)} parameters differ); something updates the weights of one rank "
            "only, or the machines round differently (--check-replicas 0 trains on without looking)"
        )
        raise ReplicasDiffer(sentence) if self.world.rank in odd else LostPeer(sentence, odd)
