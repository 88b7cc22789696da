"""fairscale: OSS with ShardedDataParallel (ZeRO stage 2): each rank keeps a part of the state and gradients.

fairscale is no longer maintained; this engine is for comparison with existing code. For new code use zero, or fsdp.
Source: https://fairscale.readthedocs.io/en/stable/tutorials/oss.html
"""

from __future__ import annotations

from contextlib import nullcontext

from samestep.engine import Engine, Layout, Needs, Numerics, State
from samestep.job import Job
from samestep.rank.process_group import process_group
from samestep.training import Run
from samestep.world import World


def layout(world: World) -> Layout:
    return Layout(replicas=world.size, buffers="local", every_gradient=True, no_phases=True)


def numerics() -> Numerics:
    return Numerics(widest="float32")  # of clip_grad_norm, whatever the weights are


def train(job: Job, world: World, run: Run) -> State:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    with process_group(world):
        module = job.model().to(world.device)
        recipe = job.optimizer
        groups = recipe.groups(module) if recipe.groups else module.parameters()
        optimizer = OSS(groups, optim=recipe.cls, **recipe.settings)
        optimizer.defaults = optimizer.optim.defaults  # which OneCycleLR reads; else those that were given alone
        # Its broadcast of buffers would come before a step's last micro-batch, where DDP's comes before the first.
        model = ShardedDataParallel(module, optimizer, broadcast_buffers=False)
        scheduler = job.lr_scheduler(optimizer)
        run.register(module, optimizer, scheduler=scheduler)
        for batch in run.batches():
            with nullcontext() if batch.completes_step else model.no_sync():
                loss = run.loss(model, batch)
                loss.backward()
            if batch.completes_step:
                if job.clip_norm is not None:
                    optimizer.clip_grad_norm(job.clip_norm)  # a rank has the gradients of its part alone
                optimizer.step()
                model.zero_grad()  # not optimizer.zero_grad(), which sets to None what is a view of a bucket
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        return dict(module.state_dict())


# Without isolation: else pip builds it with another torch.
INSTALL = "pip install --no-deps --no-build-isolation fairscale==0.4.13"
ENGINE = Engine(
    purpose="fairscale's optimizer and gradient shards",
    train=train,
    layout=layout,
    needs=Needs(packages=("fairscale",), install=INSTALL),
    numerics=numerics,
)
