"""single: plain training in one process, the baseline for every other engine's speed.

Source: https://docs.pytorch.org/tutorials/beginner/introyt/trainingyt.html
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Checks, Engine, Layout, Needs, State
from samestep.job import Batch, Job
from samestep.training import Run
from samestep.world import World


def layout(world: World) -> Layout:
    return Layout(replicas=1, closures=True)


def train(job: Job, world: World, run: Run) -> State:
    model = job.model().to(world.device)
    optimizer = job.optimizer.build(model)
    scheduler = job.lr_scheduler(optimizer)
    run.register(model, optimizer, scheduler=scheduler)

    def backward(batch: Batch) -> Tensor:
        loss = run.loss(model, batch)
        loss.backward()
        if batch.completes_step and job.clip_norm is not None:
            clip_grad_norm_(model.parameters(), job.clip_norm)
        return loss

    for batch in run.batches():
        loss = backward(batch)
        if batch.completes_step:
            optimizer.step(*run.closure(backward))
            optimizer.zero_grad()
            if job.moves_lr(batch):
                scheduler.step()
            run.step(loss)
    return model.state_dict()


ENGINE = Engine(
    purpose="plain training in one process",
    train=train,
    layout=layout,
    needs=Needs(processes="one", no_threads=""),
    checks=Checks(cannot_spot_check=""),
)
