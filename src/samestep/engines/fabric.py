"""fabric: Lightning Fabric in a plain training loop.

strategy: 'ddp', or 'model_parallel', which shards the model's parameters with fully_shard.
precision: 'full', or autocast to 'bf16'. Not fp16: on a CPU Lightning then trains in bf16, with only a warning.
Source: https://lightning.ai/docs/fabric/stable/fundamentals/convert.html
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from samestep.engine import Checks, Engine, Layout, Needs, Numerics, State
from samestep.job import Batch, Job
from samestep.message import Message, message
from samestep.rank.process_group import process_group
from samestep.rank.step import explain_ddp_error, explain_dtypes
from samestep.training import Run
from samestep.world import World

NOT_ON_SHARDS = {
    "Adafactor": message("optimizer_fails_on_shards"),
    "Muon": message("optimizer_needs_whole_matrices"),
    "Rprop": message("optimizer_fails_on_shards"),
}


def layout(world: World, strategy: str = "ddp", precision: str = "full") -> Layout:
    if strategy == "ddp":
        return Layout(replicas=world.size, buffers="rank0", every_gradient=True, closures=precision == "full")
    return Layout(replicas=world.size, buffers="local", no_scalars=True, no_optimizers=NOT_ON_SHARDS)


def numerics(precision: str = "full", **settings: Any) -> Numerics:
    if precision == "full":
        return Numerics()
    # it casts float64 inputs to float32
    return Numerics("bfloat16", lossy=True, rounds="passes", without={"precision": "full"})


def explain(error: BaseException, job: Job) -> Message | None:
    """Returns a message about parameters without a gradient, or of several dtypes; None for other errors."""
    return explain_ddp_error(error, job) or explain_dtypes(error, job)


def train(
    job: Job,
    world: World,
    run: Run,
    *,
    strategy: Literal["ddp", "model_parallel"] = "ddp",
    precision: Literal["full", "bf16"] = "full",
) -> State:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any, mesh: Any) -> Any:
        return fully_shard(model, mesh=mesh["data_parallel"])

    with process_group(world):
        sharded = strategy == "model_parallel"
        ddp = "ddp_find_unused_parameters_true" if job.phases else "ddp"  # a phase leaves the others' out
        fabric: Any = Fabric(
            accelerator="cpu" if world.device == "cpu" else "cuda",
            devices=world.local_size,
            num_nodes=world.size // world.local_size,
            strategy=ModelParallelStrategy(shard, world.size, 1) if sharded else ddp,
            precision="bf16-mixed" if precision == "bf16" else None,
        )
        fabric.launch()
        module = job.model()
        # Not setup(model, optimizer) in one: under model parallelism the optimizer would keep the unsharded
        # parameters, and nothing would train. And no setup_dataloaders: run.batches() has shared out the rows.
        model = fabric.setup_module(module)
        optimizer = job.optimizer.build(module)
        scheduler = job.lr_scheduler(optimizer)
        stepper = fabric.setup_optimizers(optimizer)
        run.register(module, optimizer, scheduler=scheduler)

        def backward(batch: Batch) -> Tensor:
            with fabric.no_backward_sync(model, enabled=not batch.completes_step):
                with fabric.autocast():  # around the loss too; the model is in it by itself
                    loss = run.loss(model, batch)
                fabric.backward(loss)
            if batch.completes_step and job.clip_norm is not None:
                fabric.clip_gradients(model, stepper, max_norm=job.clip_norm)
            return loss

        for batch in run.batches():
            loss = backward(batch)
            if batch.completes_step:
                stepper.step(*run.closure(backward))
                stepper.zero_grad()
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        return whole(module)


def whole(module: Any) -> State:
    state = module.state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


ENGINE = Engine(
    purpose="Lightning's wrapper, your own loop",
    train=train,
    layout=layout,
    needs=Needs(
        packages=("lightning",),
        preloads=("lightning",),
        no_threads=message("lightning_has_one_rank_a_process"),
    ),
    numerics=numerics,
    checks=Checks(explain=explain),
)
