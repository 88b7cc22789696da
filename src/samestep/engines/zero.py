"""zero: ZeroRedundancyOptimizer over DDP (ZeRO stage 1): each rank keeps a shard of the optimizer's state.

Source: https://docs.pytorch.org/docs/stable/distributed.optim.html
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Checks, Engine, Layout, Needs, State, without_distributed
from samestep.job import Job
from samestep.rank.process_group import process_group
from samestep.rank.step import explain_ddp_error
from samestep.training import Run
from samestep.world import World


def layout(world: World) -> Layout:
    return Layout(replicas=world.size, buffers="rank0", every_gradient=True)


def train(job: Job, world: World, run: Run) -> State:
    with process_group(world):
        module = job.model().to(world.device)
        model = DistributedDataParallel(
            module,
            device_ids=None if world.device == "cpu" else [world.device],
            find_unused_parameters=bool(job.phases),  # a phase leaves the others' out
        )
        recipe = job.optimizer
        parameters = recipe.groups(module) if recipe.groups else module.parameters()
        optimizer = ZeroRedundancyOptimizer(parameters, recipe.cls, **recipe.settings)
        optimizer.defaults = optimizer.optim.defaults  # which OneCycleLR reads; else those that were given alone
        if job.phases:  # it warns of parameters that require a gradient by turns
            logging.getLogger(ZeroRedundancyOptimizer.__module__).setLevel(logging.ERROR)
        scheduler = job.lr_scheduler(optimizer)
        run.register(module, optimizer, scheduler=scheduler)
        for batch in run.batches():
            with nullcontext() if batch.completes_step else model.no_sync():
                loss = run.loss(model, batch)
                loss.backward()
            if batch.completes_step:
                if job.clip_norm is not None:
                    clip_grad_norm_(model.parameters(), job.clip_norm)  # gradients are whole on every rank
                optimizer.step()
                optimizer.zero_grad()
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        optimizer.consolidate_state_dict(to=0)  # its state_dict() is refused before this
        return module.state_dict()


ENGINE = Engine(
    purpose="DDP with the optimizer's state sharded",
    train=train,
    layout=layout,
    needs=Needs(missing=without_distributed, no_threads=""),
    checks=Checks(explain=explain_ddp_error, cannot_spot_check=""),
)
