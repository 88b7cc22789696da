"""accelerate: Hugging Face Accelerate in a plain training loop.

precision: 'no', or autocast to 'bf16' or 'fp16'.
Start it with torchrun: `accelerate launch --cpu --num_processes 2` silently runs one process.
Source: https://huggingface.co/docs/accelerate/basic_tutorials/migration
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

from torch import Tensor

from samestep.engine import Checks, Engine, Layout, Needs, Numerics, State
from samestep.errors import Refused
from samestep.job import Batch, Job
from samestep.message import message
from samestep.rank.process_group import process_group
from samestep.rank.step import explain_ddp_error
from samestep.training import Run
from samestep.world import World


def layout(world: World, precision: str = "no") -> Layout:
    return Layout(replicas=world.size, buffers="rank0", every_gradient=True, closures=precision == "no")


def numerics(precision: str = "no") -> Numerics:
    rounds_to = {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
    return Numerics(rounds_to, lossy=rounds_to is not None, rounds="passes")


def train(job: Job, world: World, run: Run, *, precision: Literal["no", "bf16", "fp16"] = "no") -> State:
    if precision == "fp16" and world.device == "cpu":
        raise Refused(message("accelerate_computes_in_float32_on_cpu"))
    from accelerate import Accelerator, DistributedDataParallelKwargs

    with process_group(world):
        of_ddp = DistributedDataParallelKwargs(find_unused_parameters=bool(job.phases))  # a phase leaves others' out
        accelerator = Accelerator(cpu=world.device == "cpu", mixed_precision=precision, kwargs_handlers=[of_ddp])
        module = job.model()
        optimizer = job.optimizer.build(module)
        # Neither the loader nor the scheduler is prepared: run.batches() has shared out the rows already, where
        # prepare(loader) would do it again, and a prepared scheduler steps once for every rank.
        model, stepper = accelerator.prepare(module, optimizer)
        scheduler = job.lr_scheduler(optimizer)
        run.register(module, optimizer, scheduler=scheduler, scaler=accelerator.scaler)

        def backward(batch: Batch) -> Tensor:
            with nullcontext() if batch.completes_step else accelerator.no_sync(model):
                with accelerator.autocast():
                    loss = run.loss(model, batch)
                accelerator.backward(loss)
            if batch.completes_step and job.clip_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), job.clip_norm)
            return loss

        for batch in run.batches():
            loss = backward(batch)
            if batch.completes_step:
                stepper.step(*run.closure(backward))
                stepper.zero_grad()
                skipped = accelerator.optimizer_step_was_skipped
                # A step that was skipped is none to a schedule of steps; an epoch has ended all the same.
                if job.scheduler and job.moves_lr(batch) and (not skipped or job.scheduler.every == "epoch"):
                    scheduler.step()
                run.step(loss, skipped=skipped)
        return dict(accelerator.unwrap_model(model).state_dict())


ENGINE = Engine(
    purpose="Hugging Face's wrapper, your own loop",
    train=train,
    layout=layout,
    needs=Needs(packages=("accelerate",), no_threads=message("accelerate_has_one_rank_a_process")),
    numerics=numerics,
    checks=Checks(explain=explain_ddp_error),
)
