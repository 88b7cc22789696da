"""tensor: tensor parallelism; the weights of Linear layers are split over the ranks of a replica.

    samestep verify my_job.py --engine tensor --nproc 2
    samestep run my_job.py --engine tensor --mesh data=2,tensor=2

A pair of layers is split by columns, then by rows, so that one all-reduce puts their outputs together. Which pairs:
Job(parallel=…), or what is found in the model; parallel/tensor_plan.py tries either in one process before any rank
starts.
Replicas (`data`) train on their own rows, and average their gradients. sequence_parallel: between the split layers each
rank computes norms, dropout and elementwise operations on a chunk of the sequence alone. loss_parallel: each rank
computes the logits of its part of the vocabulary, and cross entropy without gathering them.
Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from samestep.engine import Checks, Engine, Layout, Needs, State, without_distributed
from samestep.job import Job
from samestep.message import Message
from samestep.parallel.loss_parallel import losses_in_parallel
from samestep.parallel.replica_gradients import average_gradients
from samestep.parallel.tensor_parallel import (
    clip_whole_norm,
    explain_split,
    how_divided,
    split_layers,
    split_output,
    step_one_by_one,
)
from samestep.rank.process_group import device_mesh, process_group
from samestep.rank.shards import NOT_ON_SHARDS, full_state_dict
from samestep.training import Run
from samestep.world import World


def layout(world: World, **settings: Any) -> Layout:
    # Nothing synchronises the replicas' buffers; the ranks of a replica have the same rows, and so the same buffers.
    return Layout(replicas=world.replicas, buffers="local", lone_batchnorm=True, no_optimizers=NOT_ON_SHARDS)


def divides(job: Job, world: World, **settings: bool) -> Message | None:
    return how_divided(job, world, **settings)


def train(job: Job, world: World, run: Run, *, sequence_parallel: bool = False, loss_parallel: bool = False) -> State:
    with process_group(world), ExitStack() as entered:
        ranks = device_mesh(world, ("data", "tensor"))
        model: nn.Module = job.model().to(world.device)
        sequence = None
        if ranks["tensor"].size() > 1:
            sequence = split_layers(model, job, ranks["tensor"], sequence_parallel=sequence_parallel)
            if loss_parallel:
                split_output(model, job, ranks["tensor"])
                entered.enter_context(losses_in_parallel())
        optimizer = job.optimizer.build(model)  # after splitting: of the parts
        step_one_by_one(optimizer)
        scheduler = job.lr_scheduler(optimizer)
        run.register(model, optimizer, scheduler=scheduler)
        if sequence:
            entered.enter_context(sequence.on_chunks())
        for batch in run.batches():
            loss = run.loss(model, batch)
            loss.backward()
            if batch.completes_step:
                if sequence:
                    sequence.sum_gradients()
                average_gradients(model.parameters(), ranks["data"].get_group())
                if job.clip_norm is not None:
                    clip_whole_norm(model.parameters(), job.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        return full_state_dict(model)


ENGINE = Engine(
    purpose="weights of layers split over ranks",
    train=train,
    layout=layout,
    needs=Needs(missing=without_distributed, no_threads=""),
    checks=Checks(divides=divides, explain=explain_split),
    axes=("tensor", "data"),
)
