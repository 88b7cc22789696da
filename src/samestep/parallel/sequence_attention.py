"""How context parallel ranks exchange the positions of a sequence, and compute attention over all of them.

Gather, Ulysses and Ring are each one rank's chunk, as parallel/sequence_blocks.py's SequenceRank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.errors import Refused
from samestep.message import message
from samestep.parallel.sequence_blocks import SequencePlan, SequenceRank, attention


class Function(torch.autograd.Function):
    """torch's, whose apply() has a type."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *arguments: Any) -> Any: ...


class Split(Function):
    """Takes this rank's positions. Backward: the gradient of all positions, of which join() has multiplied it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, chunk: Gather) -> Tensor:
        ctx.dim, ctx.chunk = dim, chunk
        return chunk.chunks.take(tensor, dim, chunk.rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.chunk.gathered(gradients[0], ctx.dim) / ctx.chunk.chunks.ranks, None, None


class Join(Function):
    """Gathers the positions of all ranks. Backward: this rank's, times the ranks: gradients are averaged over all
    ranks, and those of a replica add up to that of one process."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, chunk: Gather) -> Tensor:
        ctx.dim, ctx.chunk = dim, chunk
        return chunk.gathered(tensor, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        chunk = ctx.chunk
        return chunk.chunks.take(gradients[0], ctx.dim, chunk.rank) * chunk.chunks.ranks, None, None


class GatherKeys(Function):
    """Gathers the keys or values of all positions. Backward: the sum of what all ranks' queries say of this rank's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, chunk: Gather) -> Tensor:
        ctx.chunk = chunk
        return chunk.gathered(tensor, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.chunk.group)
        return ctx.chunk.chunks.take(total, -2, ctx.chunk.rank), None


class Gather(SequenceRank):
    """One rank's chunk, whose queries attend to the gathered keys and values of all positions."""

    def __init__(self, group: dist.ProcessGroup, plan: SequencePlan) -> None:
        self.group, self.rank, self.chunks = group, dist.get_rank(group), plan.chunks

    def split(self, tensor: Tensor, dim: int) -> Tensor:
        return Split.apply(tensor, dim, self)  # type: ignore[no-any-return]

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        return Join.apply(tensor, dim, self)  # type: ignore[no-any-return]

    def gathered(self, tensor: Tensor, dim: int) -> Tensor:
        """Returns the tensor of all positions, without a graph."""
        tensor = tensor.contiguous()
        chunks = [torch.empty_like(tensor) for _ in range(self.chunks.ranks)]
        dist.all_gather(chunks, tensor, group=self.group)
        return self.chunks.put_together(chunks, dim)

    def mask_of_all(self, mask: Tensor | None, chunk: int) -> Tensor | None:
        """Returns a mask of the keys of all positions. One of this rank's, as is made of a divided padding mask, is
        gathered. chunk: the number of the rank's positions."""
        if mask is None or mask.shape[-1] != chunk or self.chunks.ranks == 1:
            return mask
        if mask.dtype == torch.bool:
            return self.gathered(mask.byte(), -1).bool()
        return GatherKeys.apply(mask.mT, self).mT  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        keys, values = GatherKeys.apply(key, self), GatherKeys.apply(value, self)
        length, mask = keys.shape[-2], self.mask_of_all(options.pop("attn_mask"), key.shape[-2])
        if options.pop("is_causal"):
            mask = self.chunks.positions(self.rank, length, query.device)[:, None] >= torch.arange(
                length, device=query.device
            )
        elif mask is not None and mask.shape[-2] == length:
            mask = self.chunks.take(mask, -2, self.rank)
        return attention(query, keys, values, attn_mask=mask, **options)


class Exchange(Function):
    """Sends each rank its piece along `scatter` by an all-to-all, and joins those it gets along `join`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scatter: int, join: int, group: Any) -> Tensor:
        ctx.back = join, scatter, group
        sent = torch.stack(tensor.chunk(dist.get_world_size(group), scatter))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat([*received], join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Exchange.apply(gradients[0], *ctx.back), None, None, None


class Ulysses(Gather):
    """One rank's chunk, which is exchanged for all positions of some heads while attention is computed."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        inputs = [Exchange.apply(tensor, -3, -2, self.group) for tensor in (query, key, value)]
        mask = self.mask_of_all(options["attn_mask"], key.shape[-2])
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            mask = mask.chunk(self.chunks.ranks, -3)[self.rank]
        options["attn_mask"] = mask
        return Exchange.apply(attention(*inputs, **options), -2, -3, self.group)  # type: ignore[no-any-return]


class RingAttention(Function):
    """torch's own ring of keys and values, with the flash kernel of CPUs. What context_parallel() would enter around it
    fails on a CPU."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, options: Any) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        inputs: Any = [tensor.contiguous() for tensor in (query, key, value)]
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, logsumexp = ring._templated_ring_attention(group, 2, kernel, *inputs, dropout_p=0.0, **options)
        ctx.save_for_backward(*inputs, output, logsumexp)
        ctx.group, ctx.options = group, options
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        given = ctx.group, 2, kernel, gradients[0].contiguous(), "grad_out", *ctx.saved_tensors
        return (*ring._templated_ring_attention_backward(*given, dropout_p=0.0, **ctx.options)[:3], None, None)


class Ring(Gather):
    """One rank's chunk, whose keys and values go round the ranks."""

    def __init__(self, group: dist.ProcessGroup, plan: SequencePlan) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        super().__init__(group, plan)
        ring._cp_options.enable_load_balance = plan.chunks.balanced
        ring._cp_options.convert_to_f32 = False  # torch's default adds float64 up in float32

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if options["attn_mask"] is not None or query.shape != key.shape:
            raise Refused(message("ring_takes_no_mask"))
        given = {"is_causal": options["is_causal"], "scale": options["scale"]}
        return RingAttention.apply(query, key, value, self.group, given)  # type: ignore[no-any-return]


ATTENTION = {"gather": Gather, "ulysses": Ulysses, "ring": Ring}
