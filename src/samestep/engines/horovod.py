"""horovod: Horovod's DistributedOptimizer; gradients are averaged by hooks while backward runs.

compress: send gradients as fp16 (Compression.fp16).
Source: https://horovod.readthedocs.io/en/stable/pytorch.html
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Checks, Engine, Layout, Needs, Numerics, State
from samestep.errors import Refused
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.training import Run
from samestep.world import World


def missing(devices: tuple[str, ...]) -> Message | None:
    if devices[0] == "cpu":
        return None
    import horovod.torch as hvd

    return None if hvd.nccl_built() else message("horovod_without_nccl")


def layout(world: World, compress: str = "none") -> Layout:
    # Horovod does not synchronise buffers. It replaces a missing gradient by zeros, and weight decay then changes the
    # parameter.
    exact = compress == "none"
    return Layout(world.size, buffers="local", every_gradient=True, lone_batchnorm=True, closures=exact)


def numerics(compress: str = "none") -> Numerics:
    if compress == "none":
        return Numerics()
    return Numerics("float16", lossy=True, rounds="sums", without={"compress": "none"})


def train(job: Job, world: World, run: Run, *, compress: Literal["none", "fp16"] = "none") -> State:
    import horovod.torch as hvd

    hvd.init()
    model = job.model().to(world.device)
    if sent := [name for name, tensor in model.state_dict().items() if tensor.dtype == torch.bfloat16]:
        raise Refused(message("horovod_sends_no_bfloat16", tensors=sent))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()  # it sends no other
    optimizer = hvd.DistributedOptimizer(
        job.optimizer.build(model),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if compress == "fp16" else hvd.Compression.none,
        backward_passes_per_step=run.schedule.micro_batches,
    )
    scheduler = job.lr_scheduler(optimizer)
    state = {name: t for name, t in model.state_dict().items() if t.dtype != torch.bool}  # which it cannot send
    hvd.broadcast_parameters(state, root_rank=0)
    # Not hvd.broadcast_optimizer_state: on a new optimizer it takes a step with zero gradients.
    run.register(model, optimizer, scheduler=scheduler)

    def backward(batch: Batch) -> Tensor:
        loss = run.loss(model, batch)
        loss.backward()
        if batch.completes_step:
            optimizer.synchronize()
            if job.clip_norm is not None:
                clip_grad_norm_(model.parameters(), job.clip_norm)
        return loss

    for batch in run.batches():
        loss = backward(batch)
        if batch.completes_step:
            with optimizer.skip_synchronize():
                optimizer.step(*run.closure(backward))
            optimizer.zero_grad()
            if job.moves_lr(batch):
                scheduler.step()
            run.step(loss)
    return model.state_dict()


def close() -> None:
    import horovod.torch as hvd

    hvd.shutdown()  # together: a rank that leaves first would take those down that still write their record


def says_lost(error: BaseException) -> bool:
    """Returns whether Horovod raised `error` because another rank has ended."""
    return type(error).__name__ == "HorovodInternalError"


ENGINE = Engine(
    purpose="Horovod's ring all-reduce in the optimizer",
    train=train,
    layout=layout,
    needs=Needs(
        processes="horovod",
        packages=("horovod",),
        install="scripts/install-horovod",
        missing=missing,
        no_threads=message("horovod_is_one_rank_a_process"),
    ),
    numerics=numerics,
    checks=Checks(says_lost=says_lost, cannot_spot_check=""),
    close=close,
)
