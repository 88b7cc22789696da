"""ddp: DistributedDataParallel, one process per device; gradients are averaged while backward runs.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Layout, Numerics
from samestep.job import Job
from samestep.process_group import process_group
from samestep.run import Run
from samestep.world import World

PURPOSE = "data parallel, one process per device"
NEEDS: tuple[str, ...] = ()
NUMERICS = Numerics()
LAUNCHERS = ("torchrun", "spawn")


def missing(devices: tuple[str, ...]) -> str | None:
    return None if torch.distributed.is_available() else "this torch was built without torch.distributed"


def layout(world: World) -> Layout:
    return Layout(replicas=world.size, buffers="rank0")


def train(job: Job, world: World, run: Run) -> dict[str, Any]:
    with process_group(world):
        module = job.model().to(world.device)
        model = DistributedDataParallel(module, device_ids=None if world.device == "cpu" else [world.device])
        optimizer = job.optimizer.build(module)
        scheduler = job.lr_scheduler(optimizer)
        run.begin(module, optimizer)
        for batch in run.batches():
            # Gradients travel once a step: with its last micro-batch.
            with nullcontext() if batch.completes_step else model.no_sync():
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
        return module.state_dict()
