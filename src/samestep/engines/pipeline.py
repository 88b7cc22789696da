"""pipeline: pipeline parallelism; each rank has some of the model's layers, and micro-batches follow each other.

    samestep verify my_job.py --engine pipeline --nproc 2
    samestep run my_job.py --engine pipeline --mesh data=2,stage=2 --set-engine schedule=ZBVZeroBubble
    samestep run my_job.py --engine pipeline --mesh stage=2,shard=2   # each stage is sharded over two ranks, by FSDP2

With which modules the stages begin: Job(parallel={"blocks.2": "stage"}), or as many of the model's repeated blocks for
each; parallel/stage_plan.py tries either in one process before any rank starts. A step has at least `microbatches`
micro-batches, which are the job's own: 0 is two for each rank of a replica. Replicas (`data`) average their gradients
after the schedule, by hand: DDP around a stage leaves gradients out under a zero-bubble schedule, without an error
(https://github.com/pytorch/pytorch/issues/144530). Those of `shard` have their stages sharded:
parallel/sharded_stages.py.
Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from samestep.engine import Checks, Engine, Layout, Needs, State, without_distributed
from samestep.errors import Refused
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.parallel.replica_gradients import average_gradients, clip_divided_norm
from samestep.parallel.stage_plan import check_micro_batches, ranks_of_stages, stage_plan
from samestep.rank.process_group import device_mesh, process_group
from samestep.rank.shards import NOT_ON_SHARDS, block_of, full_state_dict, is_shard
from samestep.rank.step import explain_dtypes
from samestep.training import Run
from samestep.world import World
from samestep.world.mesh import Mesh

if TYPE_CHECKING:
    from samestep.parallel.pipeline_stages import DividedModel


SENDS_ANY_TENSOR = "2.13"  # the torch whose stages receive integers, too; 2.11 asks each received tensor for a gradient


def layout(world: World, *, schedule: str, microbatches: int, stages_per_rank: int) -> Layout:
    # Nothing synchronises the replicas' buffers.
    return Layout(
        replicas=world.replicas,
        buffers="local",
        lone_batchnorm=True,
        no_phases=True,
        micro_batches=microbatches or 2 * mesh_of(world).stage,
        no_optimizers=NOT_ON_SHARDS if mesh_of(world).shard > 1 else {},
    )


def mesh_of(world: World) -> Mesh:
    return world.mesh or Mesh(stage=world.size)


def divides(job: Job, world: World, *, schedule: str, microbatches: int, stages_per_rank: int) -> Message:
    """Returns how the ranks of a replica divide the job's model. Raises UserError where they cannot."""
    ranks = mesh_of(world).stage
    arranged = layout(world, schedule=schedule, microbatches=microbatches, stages_per_rank=stages_per_rank)
    rank_of = ranks_of_stages(schedule, ranks, stages_per_rank)
    check_micro_batches(job, schedule, rank_of, replicas=world.replicas, fewest=arranged.micro_batches)
    plan = stage_plan(job, len(rank_of), world.device)
    if plan.sends_without_gradient and TorchVersion(torch.__version__) < SENDS_ANY_TENSOR:
        raise Refused(message("pipeline_needs_newer_torch", torch=torch.__version__, needed=SENDS_ANY_TENSOR))
    return plan.said(job.model(), ranks)


def train(
    job: Job, world: World, run: Run, *, schedule: str = "1F1B", microbatches: int = 0, stages_per_rank: int = 2
) -> State:
    from samestep.parallel.pipeline_stages import DividedModel, Pipeline  # torch.distributed.pipelining takes a second
    from samestep.parallel.sharded_stages import shard_stages

    with process_group(world):
        ranks = device_mesh(world, ("stage", "data", "shard"))
        stages = ranks["stage"].get_group()
        rank_of = ranks_of_stages(schedule, ranks["stage"].size(), stages_per_rank)
        plan = stage_plan(job, len(rank_of), world.device)
        model: nn.Module = job.model().to(world.device)
        divided = DividedModel(model, plan, rank_of, place=ranks["stage"].get_local_rank(), device=world.device)
        divided.gather_state(stages)
        copies = groups_of_copies(divided, ranks.mesh.flatten(1))
        pipeline = Pipeline(
            divided,
            run.mean_loss,
            job.forward,
            schedule=schedule,
            micro_batches=run.schedule.micro_batches,
            group=stages,
        )
        if ranks["shard"].size() > 1:
            shard_stages(
                divided, pipeline.modules, ranks["data", "shard"] if ranks["data"].size() > 1 else ranks["shard"]
            )
        optimizer = job.optimizer.build(model)  # after sharding: of the shards
        scheduler = job.lr_scheduler(optimizer)
        run.register(model, optimizer, scheduler=scheduler)
        step: list[Batch] = []
        for batch in run.batches():
            step.append(batch)
            if batch.completes_step:
                run.begin_averages()  # before a sharded stage is gathered
                losses = pipeline.step(step)
                for micro_batch, loss in zip(step, losses):
                    run.note_loss(micro_batch, loss)
                sum_copies(divided, copies)
                unsharded = [parameter for parameter in model.parameters() if not is_shard(parameter)]
                for axis in ("data", "shard"):  # FSDP has averaged those of shards
                    average_gradients(unsharded, ranks[axis].get_group())
                if job.clip_norm is not None:
                    counted, device = divided.owned(), world.device
                    clip_divided_norm(model.parameters(), job.clip_norm, counted=counted, group=stages, device=device)
                optimizer.step()
                optimizer.zero_grad()
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(losses[-1])
                step = []
        return full_state_dict(model)


def groups_of_copies(divided: DividedModel, ranks: Tensor) -> dict[str, dist.ProcessGroup]:
    """Returns the name of each tied parameter that has copies on several ranks -> the group of these ranks.

    ranks: shape [stage, replicas]
    """
    groups: dict[str, dist.ProcessGroup] = {}
    for replica in ranks.T.tolist():
        for name, holders in divided.copies.items():
            members = [replica[place] for place in holders]
            group = dist.new_group(members)  # on every rank, in the same order
            if dist.get_rank() in members:
                groups[name] = group
    return groups


def sum_copies(divided: DividedModel, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Adds up the gradients of a tied parameter: each copy has that of the stages of its rank."""
    for name, group in groups.items():
        parameter = divided.model.get_parameter(name)
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(block_of(parameter.grad), group=group)


ENGINE = Engine(
    purpose="layers of the model on different ranks",
    train=train,
    layout=layout,
    needs=Needs(missing=without_distributed, no_threads=""),
    checks=Checks(divides=divides, explain=explain_dtypes, cannot_skip=message("pipeline_cannot_skip_steps")),
    axes=("stage", "data", "shard"),
)
