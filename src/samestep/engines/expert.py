"""expert: expert parallelism; each rank has some of the experts of a mixture, and all of the rest of the model.

    samestep verify my_job.py --engine expert --nproc 2
    samestep run my_job.py --engine expert --mesh data=2,expert=2

Every rank trains on its own rows. Two all-to-alls send a router's rows to the ranks that have their experts, and the
outputs back. Which modules are experts is found in the model; parallel/expert_plan.py tries them in one process
before any rank starts. A balancing loss in the criterion is that of each replica's rows, as under ddp; one over all
rows of a step needs Job(gather_outputs=True). Source: https://arxiv.org/abs/2006.16668 (GShard)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from samestep.engine import Checks, Engine, Layout, Needs, State, without_distributed
from samestep.job import Job
from samestep.message import Message
from samestep.parallel.expert_exchange import Exchange, TwoPasses
from samestep.parallel.expert_plan import ExpertPlan, expert_plan
from samestep.parallel.replica_gradients import average_gradients, clip_divided_norm
from samestep.parallel.stage_forward import leave_absent
from samestep.rank.process_group import device_mesh, process_group
from samestep.rank.shards import divide_along, divided_along, full_state_dict, gather_absent
from samestep.training import Run
from samestep.world import World
from samestep.world.mesh import Mesh


def layout(world: World) -> Layout:
    # Nothing synchronises the replicas' buffers.
    return Layout(replicas=world.replicas, buffers="local", lone_batchnorm=True)


def divides(job: Job, world: World) -> Message:
    """Returns how the ranks divide the job's experts. Raises UserError where they cannot."""
    ranks = (world.mesh or Mesh(expert=world.size)).expert
    return expert_plan(job, ranks, world.device).said(job.model(), ranks)


def train(job: Job, world: World, run: Run) -> State:
    with process_group(world):
        ranks = device_mesh(world, ("data", "expert"))
        experts, copies, everyone = ranks["expert"].get_group(), ranks["data"].get_group(), ranks._flatten().get_group()
        model: nn.Module = job.model().to(world.device)
        divide(model, expert_plan(job, experts.size(), world.device), experts, world.device)
        owned = [parameter for parameter in model.parameters() if divided_along(parameter)]
        shared = [parameter for parameter in model.parameters() if not (divided_along(parameter) or parameter.is_meta)]
        optimizer = job.optimizer.build(model)
        scheduler = job.lr_scheduler(optimizer)
        run.register(model, optimizer, scheduler=scheduler)
        for batch in run.batches():
            loss = run.loss(model, batch)
            loss.backward()
            if batch.completes_step:
                average_gradients(shared, everyone)
                divide_gradients(owned, experts.size())
                average_gradients(owned, copies)
                if job.clip_norm is not None:
                    counted = [*owned, *(shared if experts.rank() == 0 else ())]
                    clip_divided_norm(
                        [*owned, *shared], job.clip_norm, counted=counted, group=experts, device=world.device
                    )
                optimizer.step()
                optimizer.zero_grad()
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        return full_state_dict(model)


def divide_gradients(parameters: Iterable[nn.Parameter], ranks: int) -> None:
    """Divides the gradients of experts, which are sums over the ranks, each of which has the mean loss of its rows."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= ranks


def divide(model: nn.Module, plan: ExpertPlan, ranks: dist.ProcessGroup, device: str) -> None:
    """Leaves this rank its share of each list of experts, whose routers then exchange rows with the other ranks."""
    owners: dict[int, int] = {}  # id of an expert's parameter -> the rank that has it
    for experts in plan.lists:
        modules = {name: model.get_submodule(name) for name in experts.names}
        exchange = Exchange(modules, experts.widths, group=ranks, device=device)
        TwoPasses(model.get_submodule(experts.router), modules, exchange).install()
        for name, module in modules.items():
            owners |= {id(parameter): experts.owner(name, ranks.size()) for parameter in module.parameters()}
    by_name = {name: owners[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in owners}
    leave_absent(model, lambda tensor: owners.get(id(tensor), ranks.rank()) == ranks.rank())
    for name, owner in by_name.items():
        if owner == ranks.rank():
            divide_along(model.get_parameter(name), "expert")
    gather_absent(model, by_name, group=ranks, device=device)


ENGINE = Engine(
    purpose="experts of a mixture on different ranks",
    train=train,
    layout=layout,
    needs=Needs(missing=without_distributed, no_threads=""),
    checks=Checks(divides=divides),
    axes=("expert", "data"),
)
