"""Where the faults of models that ranks divide act: the axes that each takes, and the modules with one of which it
begins. Written down from what a fault does; see Fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mutations.faults.fault import Fault

ATTEND = ("blocks.0.attend", "blocks.1.attend")  # in both, alike
NORM, DOWN, ENDS = ("blocks.1.norm2",), ("blocks.1.down",), ("embedding", "place")
TIED, EXPERT, STAGE = ("embedding", "output"), ("blocks.1.experts.3.2",), ("blocks.7.down",)
TENSOR, DATA, BOTH, ONE_RANK = ("tensor",), ("data",), ("data", "tensor"), ()
WHOLE = ()  # of no module: what it does to the gradients, or to the update, it does to all of them

# Fault -> (axes, modules)
ORIGINS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # Its outputs are right, but on other ranks than those whose heads they are.
    "tensor: query, key and value split as one output": (TENSOR, ("blocks.0.attend", "blocks.0.project")),
    "tensor: the rows of other heads' keys": (TENSOR, ATTEND),
    "tensor: keys and values change places": (TENSOR, ATTEND),
    "tensor: a bias in the order of the model beside a weight in that of the ranks": (TENSOR, ATTEND),
    "tensor: whole weights leave in the order of the ranks": (TENSOR, ATTEND),
    "tensor: whole weights are ordered once more": (TENSOR, ATTEND),
    "tensor: sequence parallel: the gradients of norms are not added up": (TENSOR, NORM),
    "tensor: sequence parallel: the gradients of norms are averaged over the tensor ranks": (TENSOR, NORM),
    # There are other ranks than those of the tensor axis only beside another axis.
    "tensor: sequence parallel: the gradients of norms are added up over all ranks": (BOTH, NORM),
    "tensor: sequence parallel: the gradients of norms are added up after each micro-batch": (TENSOR, NORM),
    "tensor: sequence parallel: a temporary copy of the gradients is added up": (TENSOR, NORM),
    "tensor: sequence parallel: what is before the blocks has the gradient of one chunk": (TENSOR, ENDS),
    "tensor: sequence parallel: the gradient of what is joined is added up, though all ranks have it": (
        TENSOR,
        ("blocks.1.feed.2",),
    ),
    "tensor: sequence parallel: a rank's chunk of the dropout's mask is the first rank's": (TENSOR, ("blocks.0.drop",)),
    "tensor: sequence parallel: the parts of rows are averaged where they become chunks": (
        TENSOR,
        ("blocks.0.project",),
    ),
    "tensor: sequence parallel: what layers by columns read is not gathered, but taken for that of all positions": (
        TENSOR,
        ("blocks.0.attend",),
    ),
    "tensor: loss parallel: the loss is divided by the tensor ranks": (TENSOR, ("loss",)),
    "tensor: loss parallel: the gradient is divided by the tensor ranks": (TENSOR, WHOLE),
    "tensor: loss parallel: each part of the vocabulary is padded, and the padding counts": (TENSOR, ("loss",)),
    "tensor: loss parallel: targets that the loss leaves out count": (TENSOR, ("loss",)),
    "tensor: loss parallel: an embedding that shares the output layer's weight no longer does": (TENSOR, TIED),
    "tensor: loss parallel: the gradient of what the output layer reads is of one part of the vocabulary": (
        TENSOR,
        ("blocks.1.feed.2",),
    ),
    "tensor: the gradient of what is before a split layer is not reduced over the tensor ranks": (TENSOR, NORM),
    "tensor: the replicas' gradients never averaged": (DATA, WHOLE),
    "tensor: the replicas' gradients summed": (DATA, WHOLE),
    # It averages where there are replicas, and averages what differs where there are parts.
    "tensor: gradients averaged over all ranks, which have other parts": (BOTH, DOWN),
    "tensor: the gradients of split layers left out of the average": (BOTH, DOWN),
    "tensor: the gradients of whole layers left out of the average": (DATA, NORM),
    "tensor: no backward pass but of the last micro-batch": (ONE_RANK, WHOLE),
    "tensor: clipped before the average": (DATA, WHOLE),
    # It is planted as a factor, whether there are tensor ranks or not.
    "tensor: the norm of whole layers counted once a tensor rank": (ONE_RANK, WHOLE),
    "tensor: each rank clips by the norm of its own parts": (TENSOR, WHOLE),
    "tensor: split layers are not clipped": (TENSOR, DOWN),
    "tensor: the optimizer built before splitting": (TENSOR, DOWN),
    "tensor: the parts of an output averaged, not added up": (TENSOR, ("blocks.0.project",)),
    "tensor: a replica other than the first leaves out its last update of split layers": (BOTH, DOWN),
    # A rank's number is taken modulo the replicas: right wherever there is one axis.
    "tensor: rows shared out by ranks instead of replicas": (BOTH, WHOLE),
    "tensor: a step shared out among as many replicas as ranks": (TENSOR, WHOLE),
    "tensor: dropout by ranks instead of replicas": (TENSOR, ("blocks.0.drop",)),
    "tensor: dropout equal on all replicas": (DATA, ("blocks.0.drop",)),
    "fsdp: replicas of shards are sharded, and never averaged": (DATA, WHOLE),
    "fsdp: each replica's shards have the gradient of its own rows in the last step": (DATA, WHOLE),
    # It is planted in ranks 2 and 3, which there are with both axes alone.
    "fsdp: a copy of the shards leaves out its last update": (("data", "shard"), WHOLE),
    "fsdp: sharded over ranks that have the same rows": (("shard",), WHOLE),
    "fsdp: the gradient of what is before a split layer is not reduced over the tensor ranks": (TENSOR, NORM),
    "fsdp: what is split is clipped by its own norm, and what is not by its own": (TENSOR, WHOLE),
    "fsdp: what is split over both axes counts once a tensor rank in the norm": (TENSOR, WHOLE),
    "fsdp: dropout by ranks instead of replicas": (TENSOR, ("blocks.0.drop",)),
    # What is outside of the blocks every rank computes on all positions.
    "context: gradients not reduced over the sequence ranks": (("sequence",), ("blocks.1.feed.2",)),
    "context: gradients not reduced over the replicas": (DATA, WHOLE),
    "context: the gradients of blocks divided by the sequence ranks, too": (("sequence",), ("blocks.1.feed.2",)),
    # Each block takes its chunk and joins it again: before the last one is the one before it.
    "context: the gradients before the blocks multiplied by the sequence ranks": (("sequence",), ("blocks.0.feed.2",)),
    "context: the mask of another chunk's positions": (("sequence",), ("blocks.0.project",)),
    # Positions meet first in the first attention.
    "context: the positions of another chunk": (("sequence",), ("blocks.0.norm1", "blocks.0.project")),
    "context: the gradient of keys from this rank's queries alone": (("sequence",), ("blocks.1.attend",)),
    "context: the values of other ranks detached": (("sequence",), ("blocks.1.attend",)),
    "context: dropout draws the same mask for every chunk": (("sequence",), ("blocks.0.drop",)),
    "context: the backward pass of the ring has another rank's keys": (("sequence",), ("blocks.1.attend",)),
    # Where one rank has the whole sequence, its blocks are as they were: there is no ring, and no all-to-all.
    "context: the ring computes attention that is causal as if it were not": (("sequence",), ("blocks.0.project",)),
    "context: the heads put back in the order of the positions": (("sequence",), ("blocks.0.project",)),
    "context: the all-to-all has no backward pass": (("sequence",), ("blocks.1.attend",)),
    # One stage has micro-batches, too.
    "pipeline: the loss divided by the micro-batches twice": (ONE_RANK, WHOLE),
    "pipeline: the loss never divided by the micro-batches": (ONE_RANK, WHOLE),
    "pipeline: the gradient of the last micro-batch alone": (ONE_RANK, WHOLE),
    "pipeline: the copies of a tied weight not summed": (("stage",), TIED),
    "pipeline: the copies of a tied weight averaged": (("stage",), TIED),
    "pipeline: each stage clips by its own norm": (("stage",), WHOLE),
    "pipeline: a tied weight counted twice in the norm": (("stage",), WHOLE),
    "pipeline: the norm of the last stage left out": (("stage",), WHOLE),
    "pipeline: the replicas' gradients never averaged": (DATA, WHOLE),
    "pipeline: the replicas' gradients summed": (DATA, WHOLE),
    "pipeline: clipped before the average": (DATA, WHOLE),
    "pipeline: a stage that does not step": (("stage",), STAGE),
    "pipeline: a stage of the second replica leaves out its last update": (("data", "stage"), STAGE),
    "pipeline: gradients not set to zero": (ONE_RANK, WHOLE),
    # Of the third and the fourth micro-batch, which two stages have; their tokens make the last stage's mask.
    "pipeline: the labels of another micro-batch": (("stage",), ("loss", "blocks.4")),
    "pipeline: each stage draws its random numbers anew": (("stage",), ("blocks.4.drop",)),
    "pipeline: the losses of a rank that has none": (("stage",), ("loss",)),
    "pipeline: a stage's buffers from another replica": (DATA, ("blocks.7.norm",)),
    # A micro-batch has no rows where replicas times micro-batches are more than a step's rows.
    "pipeline: rows without weight change a stage's buffers": (("data", "stage"), ("blocks.7.norm",)),
    "pipeline: evaluated and saved with the first stage's weights alone": (("stage",), STAGE),
    "pipeline: the learning rate of the first stage alone moves": (("stage",), STAGE),
    "pipeline: a step shared out among as many replicas as ranks": (("stage",), WHOLE),
    "pipeline: fewer micro-batches than the engine says": (ONE_RANK, WHOLE),
    # FSDP has all parameters, but for one that several stages of one rank share.
    "pipeline: sharded: the gradients of shards summed": (("shard",), WHOLE),
    "pipeline: sharded: the norm of a rank's own shards": (("shard",), WHOLE),
    "pipeline: sharded: the copies of a tied weight not summed": (("stage",), TIED),
    "pipeline: sharded: sharded over the stages": (("shard",), WHOLE),
    "pipeline: sharded: evaluated and saved with a rank's own shards": (("shard",), WHOLE),
    "pipeline: sharded: what stays whole is not averaged": (("shard",), TIED),
    "expert: the experts' gradients not divided by the ranks": (("expert",), EXPERT),
    "expert: the experts' gradients divided twice": (("expert",), EXPERT),
    "expert: the experts' gradients averaged over ranks that have others": (("expert",), EXPERT),
    # An expert has copies, and an average of its own, only where the ranks of the other axis divide the experts.
    "expert: the copies of an expert never averaged": (("data", "expert"), EXPERT),
    "expert: what all ranks have averaged over the copies of experts alone": (("expert",), ("blocks.1.gate",)),
    "expert: what all ranks have counted in the norm by each": (("expert",), WHOLE),
    "expert: each rank clips by the norm of its own experts": (("expert",), WHOLE),
    "expert: the experts' copies not averaged where it clips": (("data", "expert"), EXPERT),
    # Where one rank has all experts, nothing is exchanged. What the second block's experts read is the norm's, which
    # both blocks share.
    "expert: no gradient goes back to the rows": (("expert",), ("norm", "blocks.0.experts.3.2")),
    "expert: the gradient of an expert's first rank alone": (("expert",), EXPERT),
    "expert: the router draws its noise anew": (("expert",), WHOLE),
    "expert: the tokens are counted twice": (("expert",), WHOLE),
    "expert: an expert takes at most four tokens": (("expert",), ("blocks.0.experts.0",)),
    "expert: the first expert of a rank computes for all": (
        ("expert",),
        ("blocks.0.experts.0", "blocks.0.experts.0.0", "blocks.0.experts.1"),
    ),
    "expert: the state has other ranks' experts as they began": (("expert",), EXPERT),
    "expert: a rank that is not the first does not step": (("expert",), EXPERT),
}


def with_origins(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Returns faults with their axes and modules."""
    return tuple(replace(fault, axes=ORIGINS[fault.name][0], modules=ORIGINS[fault.name][1]) for fault in faults)
