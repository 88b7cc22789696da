"""lightning: Lightning's Trainer, which owns the loop.

strategy: 'ddp', or 'model_parallel', which shards the model's parameters with fully_shard.
precision: 'full', or autocast to 'bf16'. Not fp16: on a CPU Lightning then trains in bf16, with only a warning.
Source: https://lightning.ai/docs/pytorch/stable/model/train_model_basic.html
"""

from __future__ import annotations

from typing import Any, Literal

from samestep.engine import Checks, Engine, Layout, Needs, Numerics, State
from samestep.job import Job
from samestep.message import Message, message
from samestep.rank.process_group import process_group
from samestep.rank.step import explain_ddp_error, explain_dtypes
from samestep.training import Run
from samestep.world import World

BY_PHASES = "ddp_find_unused_parameters_true"  # a phase leaves the others' parameters out
NOT_ON_SHARDS = {
    "Adafactor": message("optimizer_fails_on_shards"),
    "Muon": message("optimizer_needs_whole_matrices"),
    "Rprop": message("optimizer_fails_on_shards"),
}


def layout(world: World, strategy: str = "ddp", **settings: Any) -> Layout:
    if strategy == "ddp":
        return Layout(replicas=world.size, buffers="rank0", every_gradient=True)
    return Layout(replicas=world.size, buffers="local", no_scalars=True, no_optimizers=NOT_ON_SHARDS)


def numerics(precision: str = "full", **settings: Any) -> Numerics:
    if precision == "full":
        return Numerics()
    # it casts float64 inputs to float32
    return Numerics("bfloat16", lossy=True, rounds="passes", without={"precision": "full"})


def explain(error: BaseException, job: Job) -> Message | None:
    """Returns a message about parameters without a gradient, or of several dtypes; None for other errors."""
    if "not used in producing the loss" in str(error):  # the Trainer's words for DDP's error
        return message("some_parameters_have_no_gradient")
    return explain_ddp_error(error, job) or explain_dtypes(error, job)


def train(
    job: Job,
    world: World,
    run: Run,
    *,
    strategy: Literal["ddp", "model_parallel"] = "ddp",
    precision: Literal["full", "bf16"] = "full",
) -> State:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    sharded = strategy == "model_parallel"

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()

        def configure_model(self) -> None:
            if sharded:
                mesh: Any = self.device_mesh
                fully_shard(self.model, mesh=mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            optimizer = job.optimizer.build(self.model)
            self.scheduler = job.lr_scheduler(optimizer)
            run.register(self.model, optimizer, scheduler=self.scheduler)
            return optimizer

        def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
            return batch  # it is there already

        def training_step(self, batch: Any, number: int) -> Any:
            # The Trainer divides by the number of micro-batches, even where a window has fewer.
            return run.loss(self.model, batch) * run.schedule.micro_batches

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            if batch.completes_step:
                if job.moves_lr(batch):
                    self.scheduler.step()
                run.step(outputs["loss"])

    with process_group(world):
        trainer = Trainer(
            accelerator="cpu" if world.device == "cpu" else "cuda",
            devices=world.local_size,
            num_nodes=world.size // world.local_size,
            strategy=ModelParallelStrategy(world.size, 1) if sharded else BY_PHASES if job.phases else "ddp",
            precision="bf16-mixed" if precision == "bf16" else None,
            max_epochs=1,  # of what run.batches() gives: all of them
            accumulate_grad_batches=run.schedule.micro_batches,
            gradient_clip_val=job.clip_norm,
            use_distributed_sampler=False,  # run.batches() has shared out the rows
            barebones=True,
        )
        module = Module()
        trainer.fit(module, run.batches())
        state = module.model.state_dict()
        return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


ENGINE = Engine(
    purpose="Lightning's Trainer, which owns the loop",
    train=train,
    layout=layout,
    needs=Needs(
        packages=("lightning",),
        preloads=("lightning",),
        no_threads=message("lightning_has_one_rank_a_process"),
    ),
    numerics=numerics,
    checks=Checks(explain=explain, cannot_skip=message("trainer_computes_gradients_inside_the_step")),
)
