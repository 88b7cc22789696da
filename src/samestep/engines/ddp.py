"""ddp: DistributedDataParallel, one process per device; gradients are averaged while backward runs.

compress: send gradients as fp16, as bf16 (NCCL only) or compressed by PowerSGD. order='rank': add the gradients in
rank order, which gives the same bits on any number of ranks. static_graph, bucket_mb, find_unused: DDP's own options.
compile: torch.compile of the wrapped model.
Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
        https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Checks, Engine, Layout, Needs, Numerics, State, without_distributed
from samestep.errors import Refused, UserError
from samestep.job import Batch, Job
from samestep.message import message
from samestep.rank.process_group import process_group
from samestep.rank.step import explain_ddp_error
from samestep.training import Run
from samestep.world import World

EXACT = 2  # steps before PowerSGD compresses: the fewest that DDP allows


def layout(
    world: World, find_unused: bool = False, compress: str = "none", bucket_mb: float | None = None, **settings: Any
) -> Layout:
    if bucket_mb is not None and not 0 < bucket_mb <= 1e6:
        raise UserError(f"--set-engine bucket_mb={bucket_mb:g}: it must be above 0, and at most 1e6")
    factors = compress == "powersgd"  # it factors matrices, and fails for a parameter without dimensions
    return Layout(world.size, "even", "rank0", not find_unused, no_scalars=factors, closures=compress == "none")


def numerics(compress: str = "none", **settings: Any) -> Numerics:
    if compress == "none":
        return Numerics()
    rounds_to, exact = {"fp16": ("float16", 0), "bf16": ("bfloat16", 0), "powersgd": (None, EXACT)}[compress]
    return Numerics(rounds_to, lossy=True, rounds="sums", without={"compress": "none"}, exact_steps=exact)


def train(
    job: Job,
    world: World,
    run: Run,
    *,
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none",
    order: Literal["any", "rank"] = "any",
    static_graph: bool = False,
    find_unused: bool = False,
    bucket_mb: float | None = None,
    compile: bool = False,
) -> State:
    if static_graph and (job.phases or run.schedule.micro_batches > 1):
        raise Refused(message("static_graph_with_phases" if job.phases else "static_graph_with_accumulation"))
    if compress == "bf16" and world.device == "cpu":
        raise Refused(message("gloo_cannot_compress_to_bf16"))
    if order == "rank" and compress != "none":
        raise Refused(message("ddp_takes_one_communication_hook"))
    with process_group(world):
        module = job.model().to(world.device)
        model: Any = DistributedDataParallel(
            module,
            device_ids=None if world.device == "cpu" else [world.device],
            bucket_cap_mb=bucket_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused or bool(job.phases),  # a phase leaves the others' out
        )
        if compress == "powersgd":
            model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=EXACT), powerSGD_hook)
        elif compress != "none":
            model.register_comm_hook(None, getattr(default_hooks, compress + "_compress_hook"))
        elif order == "rank":
            model.register_comm_hook(None, in_rank_order)
        trained: Any = torch.compile(model) if compile else model
        optimizer = job.optimizer.build(module)
        scheduler = job.lr_scheduler(optimizer)
        run.register(module, optimizer, scheduler=scheduler)

        def backward(batch: Batch) -> Tensor:
            with nullcontext() if batch.completes_step else model.no_sync():
                loss = run.loss(trained, batch)
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
        return module.state_dict()


def in_rank_order(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """A DDP communication hook: averages gradients in rank order. An all-reduce's order changes with the world size."""
    gradients = bucket.buffer()
    of_rank = [torch.empty_like(gradients) for _ in range(dist.get_world_size())]
    gathered = dist.all_gather(of_rank, gradients, async_op=True).get_future()
    return gathered.then(lambda _: sum(of_rank[1:], of_rank[0]) / len(of_rank))


ENGINE = Engine(
    purpose="data parallel, one process per device",
    train=train,
    layout=layout,
    needs=Needs(missing=without_distributed, no_threads=""),
    numerics=numerics,
    checks=Checks(explain=explain_ddp_error, cannot_spot_check=""),
)
