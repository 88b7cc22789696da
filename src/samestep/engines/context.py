"""context: context parallelism; the positions of a sequence are divided among the ranks of a replica.

    samestep verify charlm --engine context --nproc 2
    samestep run charlm --engine context --mesh data=2,sequence=2 --set-engine how=ring

Each rank computes the model's blocks on its chunk of the positions, which meet in attention alone. how=gather: each
rank gathers the keys and values of all; ulysses: an all-to-all gives each rank all positions of some heads; ring: keys
and values go round, a chunk at a time. What is before and after the blocks, such as embeddings and the loss, every
rank computes on all positions. Replicas (`data`) train on their own rows.
Sources: https://docs.pytorch.org/tutorials/unstable/context_parallel.html
         S. A. Jacobs et al., "DeepSpeed Ulysses", 2023; H. Liu et al., "Ring Attention", 2023
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Checks, Engine, Layout, Needs, State, without_distributed
from samestep.job import Batch, Job
from samestep.message import Message
from samestep.parallel.sequence_attention import ATTENTION
from samestep.parallel.sequence_blocks import on_chunks, sequence_plan
from samestep.rank.process_group import device_mesh, process_group
from samestep.rank.step import explain_ddp_error
from samestep.training import Run
from samestep.world import World
from samestep.world.mesh import Mesh


def layout(world: World, **settings: Any) -> Layout:
    return Layout(replicas=world.replicas, every_gradient=True, no_phases=True, closures=True)


def divides(job: Job, world: World, how: str = "gather") -> Message:
    """Returns how the ranks of a replica divide the sequence. Raises UserError where they cannot."""
    return sequence_plan(job, (world.mesh or Mesh()).sequence, how, world.device).said(job.model(), how)


def train(job: Job, world: World, run: Run, *, how: Literal["gather", "ulysses", "ring"] = "gather") -> State:
    with process_group(world):
        ranks = device_mesh(world, ("data", "sequence"))
        plan = sequence_plan(job, ranks["sequence"].size(), how, world.device)
        module = job.model().to(world.device)
        # Over all ranks: those of a replica have gradients of their positions, those of replicas of their rows.
        model = DistributedDataParallel(module, device_ids=None if world.device == "cpu" else [world.device])
        optimizer = job.optimizer.build(module)
        scheduler = job.lr_scheduler(optimizer)
        run.register(module, optimizer, scheduler=scheduler)

        def backward(batch: Batch) -> Tensor:
            with nullcontext() if batch.completes_step else model.no_sync():
                loss = run.loss(model, batch)
                loss.backward()
            if batch.completes_step and job.clip_norm is not None:
                clip_grad_norm_(model.parameters(), job.clip_norm)
            return loss

        with on_chunks(module, plan.blocks, ATTENTION[how](ranks["sequence"].get_group(), plan)):
            for batch in run.batches():
                loss = backward(batch)
                if batch.completes_step:
                    optimizer.step(*run.closure(backward))
                    optimizer.zero_grad()
                    if job.moves_lr(batch):
                        scheduler.step()
                    run.step(loss)
        return module.state_dict()


ENGINE = Engine(
    purpose="positions of sequences split over ranks",
    train=train,
    layout=layout,
    needs=Needs(missing=without_distributed, no_threads=""),
    checks=Checks(divides=divides, explain=explain_ddp_error),
    axes=("sequence", "data"),
)
