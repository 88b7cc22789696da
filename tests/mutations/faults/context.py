"""Faults of context parallelism, planted on two replicas of two ranks each."""

from __future__ import annotations

from mutations.faults.fault import Fault

CONTEXT, ATTENTION, BLOCKS = "engines/context.py", "parallel/sequence_attention.py", "parallel/sequence_blocks.py"
JOBS, MESH = ("sequences",), "data=2,sequence=2"
GRADIENT = ("first gradient",)
WRONG = ("first gradient", "loss")  # the forward pass is another one
RING = "        ctx.save_for_backward(*inputs, output, logsumexp)\n"


def fault(name: str, file: str, old: str, new: str, named: tuple[str, ...], how: str = "gather") -> Fault:
    return Fault(
        f"context: {name}", file, old, new, named, "", JOBS, engine="context", settings={"how": how}, mesh=MESH
    )


CLIPPED = "clip_grad_norm_(model.parameters(), job.clip_norm)\n"
HEALTHY = fault("nothing", CONTEXT, CLIPPED, CLIPPED, ())

FAULTS = (
    fault(
        "gradients not reduced over the sequence ranks",
        CONTEXT,
        "module, device_ids=None",
        'module, process_group=ranks["data"].get_group(), device_ids=None',
        GRADIENT,
    ),
    fault(
        "gradients not reduced over the replicas",
        CONTEXT,
        "module, device_ids=None",
        'module, process_group=ranks["sequence"].get_group(), device_ids=None',
        GRADIENT,
    ),
    fault(
        "the gradients of blocks divided by the sequence ranks, too",
        ATTENTION,
        "chunk.chunks.take(gradients[0], ctx.dim, chunk.rank) * chunk.chunks.ranks, None",
        "chunk.chunks.take(gradients[0], ctx.dim, chunk.rank), None",
        GRADIENT,
    ),
    fault(
        "the gradients before the blocks multiplied by the sequence ranks",
        ATTENTION,
        "ctx.chunk.gathered(gradients[0], ctx.dim) / ctx.chunk.chunks.ranks, None",
        "ctx.chunk.gathered(gradients[0], ctx.dim), None",
        GRADIENT,
    ),
    fault(
        "the mask of another chunk's positions",
        ATTENTION,
        "self.chunks.positions(self.rank, length, query.device)",
        "self.chunks.positions((self.rank + 1) % self.chunks.ranks, length, query.device)",
        WRONG,
    ),
    fault(
        "the positions of another chunk",
        ATTENTION,
        "        return chunk.chunks.take(tensor, dim, chunk.rank)\n",
        "        return chunk.chunks.take(tensor, dim, (chunk.rank + 1) % chunk.chunks.ranks)\n",
        WRONG,
    ),
    fault(
        "the gradient of keys from this rank's queries alone",
        ATTENTION,
        "        dist.all_reduce(total, group=ctx.chunk.group)\n",
        "",
        GRADIENT,
    ),
    fault(
        "the values of other ranks detached",
        ATTENTION,
        "GatherKeys.apply(value, self)\n",
        "self.gathered(value, -2)\n",
        GRADIENT,
    ),
    fault(
        "dropout draws the same mask for every chunk",
        BLOCKS,
        "self.ranked.chunks.take(mask, self.dim, self.ranked.rank)",
        "self.ranked.chunks.take(mask, self.dim, 0)",
        (*WRONG, "failed"),
    ),
    fault(
        "the backward pass of the ring has another rank's keys",
        ATTENTION,
        RING,
        "        sent = [torch.empty_like(inputs[1]) for _ in range(dist.get_world_size(group))]\n"
        "        dist.all_gather(sent, inputs[1], group=group)\n"
        "        inputs[1] = sent[dist.get_rank(group) - 1]\n" + RING,
        GRADIENT,
        "ring",
    ),
    fault(
        "the ring computes attention that is causal as if it were not",
        ATTENTION,
        '{"is_causal": options["is_causal"], "scale"',
        '{"is_causal": False, "scale"',
        (*WRONG, "failed"),
        "ring",
    ),
    fault(
        "the heads put back in the order of the positions",
        ATTENTION,
        "        return torch.cat([*received], join)\n",
        "        return torch.cat([*received][::-1], join)\n",
        WRONG,
        "ulysses",
    ),
    fault(
        "the all-to-all has no backward pass",
        ATTENTION,
        "        return Exchange.apply(gradients[0], *ctx.back), None, None, None\n",
        "        return torch.zeros_like(Exchange.apply(gradients[0], *ctx.back)), None, None, None\n",
        GRADIENT,
        "ulysses",
    ),
)
