"""dataparallel: torch.nn.DataParallel, one process that drives several GPUs with threads.

PyTorch recommends DDP instead, even on one machine; this engine is for comparison with existing DataParallel code.
It is unavailable on a CPU, where DataParallel silently calls the module itself.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import DataParallel
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Engine, Layout, Needs, State
from samestep.errors import Refused
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.training import Run
from samestep.world import World


def missing(devices: tuple[str, ...]) -> Message | None:
    if devices[0] == "cpu":
        return message("dataparallel_does_nothing_on_cpu")
    return None if len(devices) > 1 else message("dataparallel_needs_two_devices", device=devices[0])


def layout(world: World) -> Layout:
    return Layout(replicas=len(world.devices), split="chunk", lone_batchnorm=True, closures=True)


def train(job: Job, world: World, run: Run) -> State:
    if job.carry_state:
        raise Refused(message("dataparallel_cannot_split_carried_state"))
    module = job.model().to(world.device)
    model = DataParallel(module, device_ids=[torch.device(device) for device in world.devices])
    optimizer = job.optimizer.build(module)
    scheduler = job.lr_scheduler(optimizer)
    run.register(module, optimizer, scheduler=scheduler)

    def backward(batch: Batch) -> Tensor:
        loss = run.loss(model, batch)
        loss.backward()
        if batch.completes_step and job.clip_norm is not None:
            clip_grad_norm_(module.parameters(), job.clip_norm)
        return loss

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
    purpose="one process, a thread per GPU",
    train=train,
    layout=layout,
    needs=Needs(processes="one", missing=missing, no_threads=""),
)
