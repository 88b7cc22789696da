"""ray: Ray Train's TorchTrainer, which starts the ranks itself, around a loop of your own.

Source: https://docs.ray.io/en/latest/train/getting-started-pytorch.html
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Checks, Engine, Layout, Needs, State
from samestep.job import Batch, Job
from samestep.message import message
from samestep.rank.process_group import process_group
from samestep.rank.step import explain_ddp_error
from samestep.training import Run
from samestep.world import World


def layout(world: World) -> Layout:
    return Layout(replicas=world.size, buffers="rank0", every_gradient=True, closures=True)


def train(job: Job, world: World, run: Run) -> State:
    from ray.train.torch import prepare_model

    with process_group(world):  # TorchTrainer has opened it
        module = job.model()
        # prepare_data_loader is not used: run.batches() has shared out the rows already.
        model: Any = prepare_model(
            module,
            move_to_device=torch.device(world.device),
            parallel_strategy_kwargs={"find_unused_parameters": bool(job.phases)},  # a phase leaves the others' out
        )
        optimizer = job.optimizer.build(module)
        scheduler = job.lr_scheduler(optimizer)
        run.register(module, optimizer, scheduler=scheduler)

        def backward(batch: Batch) -> Tensor:
            # Ray wraps nothing where there is one rank.
            with model.no_sync() if not batch.completes_step and hasattr(model, "no_sync") else nullcontext():
                loss = run.loss(model, batch)
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


ENGINE = Engine(
    purpose="Ray Train, which starts the ranks",
    train=train,
    layout=layout,
    needs=Needs(
        processes="ray",
        packages=("ray", "pyarrow"),
        install="pip install 'ray[train]>=2.60'",
        no_threads=message("ray_starts_processes"),
    ),
    checks=Checks(explain=explain_ddp_error),
)
