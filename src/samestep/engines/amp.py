"""amp: automatic mixed precision with DDP, the successor of NVIDIA Apex's amp.

precision: autocast to bf16, or to fp16 with a GradScaler, which skips the steps whose gradients overflow.
Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Checks, Engine, Layout, Needs, Numerics, State, without_distributed
from samestep.job import Job
from samestep.rank.process_group import process_group
from samestep.rank.step import explain_ddp_error
from samestep.training import Run
from samestep.world import World

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def layout(world: World, **settings: Any) -> Layout:
    return Layout(replicas=world.size, buffers="rank0", every_gradient=True)


def numerics(precision: str = "bf16") -> Numerics:
    # autocast leaves float64 alone
    return Numerics(str(DTYPES[precision]).removeprefix("torch."), lossy=True, rounds="passes")


def train(job: Job, world: World, run: Run, *, precision: Literal["bf16", "fp16"] = "bf16") -> State:
    with process_group(world):
        device = world.device.partition(":")[0]
        module = job.model().to(world.device)
        model = DistributedDataParallel(
            module,
            device_ids=None if device == "cpu" else [world.device],
            find_unused_parameters=bool(job.phases),  # a phase leaves the others' out
        )
        optimizer = job.optimizer.build(module)
        scheduler = job.lr_scheduler(optimizer)
        scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")  # bf16 has float32's range
        run.register(module, optimizer, scheduler=scheduler, scaler=scaler)
        for batch in run.batches():
            with nullcontext() if batch.completes_step else model.no_sync():
                with torch.autocast(device, DTYPES[precision]):
                    loss = run.loss(model, batch)
                scaler.scale(loss).backward()
            if batch.completes_step:
                scaler.unscale_(optimizer)
                if job.clip_norm is not None:
                    clip_grad_norm_(model.parameters(), job.clip_norm)
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                skipped = scaler.get_scale() < scale  # an overflow: the weights stay as they are
                # A step that was skipped is none to a schedule of steps; an epoch has ended all the same.
                if job.scheduler and job.moves_lr(batch) and (not skipped or job.scheduler.every == "epoch"):
                    scheduler.step()
                run.step(loss, skipped=skipped)
        return module.state_dict()


ENGINE = Engine(
    purpose="DDP in mixed precision, formerly Apex",
    train=train,
    layout=layout,
    needs=Needs(missing=without_distributed, no_threads=""),
    numerics=numerics,
    checks=Checks(explain=explain_ddp_error, cannot_spot_check=""),
)
