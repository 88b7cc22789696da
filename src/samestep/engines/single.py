"""single: plain training in one process, the baseline for every other engine's speed.

Source: https://docs.pytorch.org/tutorials/beginner/introyt/trainingyt.html
"""

from __future__ import annotations

from torch.nn.utils import clip_grad_norm_

from samestep.engine import Layout, Numerics, State
from samestep.job import Job
from samestep.training import Run
from samestep.world import World

PURPOSE = "plain training in one process"
NEEDS: tuple[str, ...] = ()
PROCESSES = "one"


def missing(devices: tuple[str, ...]) -> str | None:
    return None


def layout(world: World) -> Layout:
    return Layout(replicas=1)


def numerics() -> Numerics:
    return Numerics()


def train(job: Job, world: World, run: Run) -> State:
    model = job.model().to(world.device)
    optimizer = job.optimizer.build(model)
    scheduler = job.lr_scheduler(optimizer)
    run.begin(model, optimizer, scheduler=scheduler)
    for batch in run.batches():
        loss = run.loss(model, batch)
        loss.backward()
        if batch.completes_step:
            if job.clip_norm is not None:
                clip_grad_norm_(model.parameters(), job.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if job.moves_lr(batch):
                scheduler.step()
            run.step(loss)
    return model.state_dict()
