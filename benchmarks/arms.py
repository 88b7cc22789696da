"""The arms of overhead.py: the same training by our engine and as others would write it. turns.py lets them alternate.

All arms share the ranks, the process group and the allocator; each has its own model, optimizer and loader.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import logging
import os
import platform
import random
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from samestep import Job
from samestep.engines import ddp
from samestep.jobs import digits
from samestep.training import Run
from samestep.world import World
from samestep.world.processes import die_with_parent
from turns import WARM_UP, ModelState, Train, Turn, check

WIDTHS = {"small": 16, "wide": 96}  # of the digits job's conv net: about 2 and 22 ms of arithmetic a step and core


def loader(job: Job, world: World, **settings: Any) -> DataLoader[Any]:
    """What everyone writes: a rank's share of each batch, collated row by row."""
    rows = job.global_batch // world.size
    pin = world.device != "cpu"
    return DataLoader(job.train, batch_size=rows, drop_last=True, pin_memory=pin, **settings)  # type: ignore[arg-type]


def samestep(job: Job, world: World, turn: Turn) -> ModelState:
    """Our engine's own file; only the end of a step is told on."""

    class TurnRun(Run):
        def step(self, loss: Tensor) -> None:
            super().step(loss)
            turn.step_ended(loss)

    return ddp.train(replace(job, model=turn.model), world, TurnRun(job, world, turn.steps))


def handwritten(job: Job, world: World, turn: Turn) -> ModelState:
    """The loop of PyTorch's tutorial: https://docs.pytorch.org/tutorials/beginner/ddp_series_multigpu.html"""
    sampler: Any = DistributedSampler(job.train, drop_last=True)  # type: ignore[arg-type]
    return by_hand(job, world, turn, sampler, loader(job, world, sampler=sampler))


def handwritten_fast(job: Job, world: World, turn: Turn) -> ModelState:
    """The same loop, but a batch is fetched from the TensorDataset by one indexing, as our loader does."""
    sampler: Any = DistributedSampler(job.train, drop_last=True)  # type: ignore[arg-type]
    batches = BatchSampler(sampler, job.global_batch // world.size, drop_last=True)
    pin = world.device != "cpu"
    return by_hand(job, world, turn, sampler, DataLoader(job.train, sampler=batches, batch_size=None, pin_memory=pin))  # type: ignore[arg-type]


def by_hand(job: Job, world: World, turn: Turn, sampler: Any, data: DataLoader[Any]) -> ModelState:
    module = turn.model().to(world.device)
    model = DistributedDataParallel(module, device_ids=None if world.device == "cpu" else [world.device])
    optimizer = job.optimizer.build(module)
    scheduler = job.lr_scheduler(optimizer)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for inputs, targets in data:
            inputs = inputs.to(world.device, non_blocking=True)
            targets = targets.to(world.device, non_blocking=True)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if turn.step_ended(loss):
                return module.state_dict()
        epoch += 1


def lightning(job: Job, world: World, turn: Turn) -> ModelState:
    """Lightning's Trainer in its own mode for such measurements: no logger, progress bar or checkpoint."""
    from lightning import Callback, LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = turn.model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            inputs, targets = batch
            return F.cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self) -> Any:
            optimizer = job.optimizer.build(self.net)
            return [optimizer], [{"scheduler": job.lr_scheduler(optimizer), "interval": "step"}]

    class StepEnds(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            turn.step_ended(outputs["loss"])

    module = Module()
    where = "cpu" if world.device == "cpu" else "gpu"
    trainer = Trainer(
        accelerator=where, devices=world.size, strategy="ddp", barebones=True, max_steps=turn.steps, max_epochs=-1,
        callbacks=[StepEnds()],
    )  # fmt: skip
    trainer.fit(module, loader(job, world, shuffle=True))
    return module.net.state_dict()


def fabric(job: Job, world: World, turn: Turn) -> ModelState:
    """https://lightning.ai/docs/fabric/stable/fundamentals/convert.html"""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu" if world.device == "cpu" else "gpu", devices=world.size, strategy="ddp")
    fabric.launch()
    module = turn.model()
    model, optimizer = fabric.setup(module, job.optimizer.build(module))
    scheduler = job.lr_scheduler(optimizer)
    data = fabric.setup_dataloaders(loader(job, world, shuffle=True))
    while True:
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            if turn.step_ended(loss):
                return module.state_dict()


def accelerate(job: Job, world: World, turn: Turn) -> ModelState:
    """https://huggingface.co/docs/accelerate/quicktour"""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=world.device == "cpu", step_scheduler_with_optimizer=False)  # one step of the rate
    module = turn.model()
    optimizer = job.optimizer.build(module)
    model, optimizer, data, scheduler = accelerator.prepare(
        module, optimizer, loader(job, world, shuffle=True), job.lr_scheduler(optimizer)
    )
    while True:
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            if turn.step_ended(loss):
                return module.state_dict()


ARMS: dict[str, tuple[Train, str]] = {  # each with the package that it needs
    "samestep": (samestep, "torch"),
    "handwritten": (handwritten, "torch"),
    "handwritten_fast": (handwritten_fast, "torch"),
    "control": (handwritten, "torch"),  # the same code once more: what this method reads where nothing differs
    "lightning": (lightning, "lightning"),
    "fabric": (fabric, "lightning"),
    "accelerate": (accelerate, "accelerate"),
}


def absent(name: str) -> str | None:
    """The package that arm `name` needs and that is not here."""
    package = ARMS[name][1]
    return None if importlib.util.find_spec(package) else package


def conduct(model: str, names: list[str], rounds: int, block: int, world: World) -> dict[str, Any]:
    """Trains every arm, a block at a time in an order that changes from round to round; checks each one's training."""
    job = digits.job(width=WIDTHS[model], global_batch=64)
    job = replace(job, last="drop")  # whole batches only: some arms fill up, some do not
    turns = [Turn(name, ARMS[name][0], job, world, rounds, block) for name in names]
    for turn in turns:
        for _ in range(WARM_UP):
            turn.take()
        turn.warm()
    gc.freeze()  # what is alive now is not searched again, so that a collection costs little, whoever's block it meets
    for number in range(rounds):
        for turn in random.Random(number).sample(turns, len(turns)):
            gc.collect()  # no arm pays for another's garbage
            turn.take()
    for turn in turns:
        turn.take()
        check(turn)
    return {
        turn.name: {
            "wall_s": [block[:, 0].tolist() for block in turn.blocks],
            "cpu_s": [block[:, 1].tolist() for block in turn.blocks],
            "steps": turn.steps,
            "rows_per_step": sorted(set(turn.seen)),
            "loss": [turn.losses[0], turn.losses[-1]],
        }
        for turn in turns
    }


def rank_main(
    rank: int, devices: str, model: str, names: list[str], rounds: int, block: int, deadline_s: float, folder: str
) -> None:
    """The life of one rank; rank 0 leaves result.json in `folder`. Never returns: gloo's threads may abort in exit."""
    die_with_parent()
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    warnings.filterwarnings("ignore")
    size = len(devices.split(","))
    if hasattr(os, "sched_setaffinity"):  # each rank its own cores
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // size)
        os.sched_setaffinity(0, [cores[i % len(cores)] for i in range(rank * each, (rank + 1) * each)])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"SAMESTEP_DEVICES": devices, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    world = World.from_env(os.environ)
    if world.device != "cpu":
        torch.cuda.set_device(world.device)
    meeting, patience = f"file://{folder}/rendezvous", timedelta(seconds=deadline_s)
    dist.init_process_group(world.backend, init_method=meeting, rank=rank, world_size=size, timeout=patience)
    result = {"arms": conduct(model, names, rounds, block, world), "machine": machine(world)}
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def machine(world: World) -> dict[str, Any]:
    packages = ["torch", *(name for name in ("lightning", "accelerate") if importlib.util.find_spec(name))]
    return {
        "processor": platform.processor() or platform.machine(),
        "gpu": None if world.device == "cpu" else torch.cuda.get_device_name(world.device),
        "cores": os.cpu_count(),
        "ranks": world.size,
        "backend": world.backend,
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
    }
