"""The arms of overhead.py: the same training as one loop of ours and as others would write it, taking turns.

Each arm is a whole training loop in a thread of its own. Only one runs at a time: a loop tells its `Turn` of the end of
each step, and after a block of steps the turn hands over and waits. The order is the same on every rank, so that
collectives meet. A block's first step is never timed, for any arm: it finds the caches full of another arm's
tensors, and a rank that came early waits in it. All arms share the ranks, the process group and the allocator.
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
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from samestep import Job
from samestep.engines import ddp
from samestep.jobs import digits
from samestep.lifeline import die_with_parent
from samestep.run import Run
from samestep.world import World

WIDTHS = {"small": 16, "wide": 96}  # of the digits job's conv net: about 2 and 22 ms of arithmetic a step and core
WARM_UP = 2  # blocks: DDP rebuilds its buckets, allocators and threads settle, an epoch ends
ModelState = dict[str, Tensor]


class Turn:
    """One arm's turns: its thread, its step times, its checks."""

    def __init__(self, name: str, job: Job, world: World, rounds: int, block: int) -> None:
        self.name, self.job, self.world, self.block = name, job, world, block
        self.steps = (WARM_UP + rounds) * block
        self.rows = job.global_batch // world.size  # of a step on this rank
        self.seen: list[int] = []  # rows of each warm-up step
        self.losses: list[float] = []  # of the first and the last step of each block
        self.blocks: list[list[float]] = []  # seconds of each step but the first
        self.state: ModelState = {}
        self.cpu_s: list[float] = []  # the loop's own thread, per step, one value a block
        self._stamps: list[float] = []
        self._cpu_stamps: list[float] = []
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, name=name, daemon=True)
        self._thread.start()

    def take(self) -> None:
        """Lets the arm run one block, or to its end after its last one."""
        self._go.release()
        self._paused.acquire()
        if self._error:
            raise self._error

    def model(self) -> nn.Module:
        """The arm's own copy of the network, which counts the rows that it is given until the warm-up is over."""
        model = self.job.model()
        self._counter = model.register_forward_pre_hook(lambda _, inputs: self.seen.append(len(inputs[0])))
        return model

    def warm(self) -> None:
        """Ends the warm-up: what is timed has no hook."""
        self._counter.remove()
        self.blocks.clear()
        self.cpu_s.clear()

    def step_ended(self, loss: Tensor) -> bool:
        """Every loop calls this at the end of each step. Returns True after its last step."""
        if not self._stamps or len(self._stamps) == self.block - 1:  # where the timed interval begins and ends
            self.losses.append(float(loss))
            if self.world.device != "cpu":
                torch.cuda.synchronize()
            self._cpu_stamps.append(time.thread_time())
        self._stamps.append(time.perf_counter())
        if len(self._stamps) < self.block:
            return False
        self.blocks.append([b - a for a, b in zip(self._stamps, self._stamps[1:])])
        begin, end = self._cpu_stamps
        self.cpu_s.append((end - begin) / (self.block - 1))
        self._stamps.clear()
        self._cpu_stamps.clear()
        self._paused.release()
        self._go.acquire()
        return self.finished

    @property
    def finished(self) -> bool:
        return len(self.losses) == 2 * self.steps // self.block

    def _train(self) -> None:
        self._go.acquire()
        torch.set_num_threads(1)  # a setting of each thread
        try:
            self.state = ARMS[self.name][0](self.job, self.world, self)
            assert self.finished, f"{self.name} ended after {len(self.losses) / 2} blocks"
        except BaseException as error:
            self._error = error
        self._paused.release()


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
            inputs, targets = inputs.to(world.device), targets.to(world.device)
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


ARMS: dict[str, tuple[Callable[[Job, World, Turn], ModelState], str]] = {  # each with the package that it needs
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
    job = replace(digits.job(width=WIDTHS[model]), last="drop")  # whole batches only: some arms fill up, some do not
    turns = [Turn(name, job, world, rounds, block) for name in names]
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
            "step_s": turn.blocks,
            "cpu_s": turn.cpu_s,
            "steps": turn.steps,
            "rows_per_step": sorted(set(turn.seen)),
            "loss": [turn.losses[0], turn.losses[-1]],
        }
        for turn in turns
    }


def check(turn: Turn) -> None:
    """Raises AssertionError unless the arm has trained: rows, loss, weights, and the same weights on every rank."""
    assert turn.seen == [turn.rows] * WARM_UP * turn.block, f"{turn.name} saw {set(turn.seen)} rows, not {turn.rows}"
    assert turn.losses[-1] < turn.losses[0], f"{turn.name}'s loss rose: {turn.losses[0]} to {turn.losses[-1]}"
    start = dict(turn.job.model().named_parameters())
    for name, value in start.items():
        end = turn.state[name].detach().to(turn.world.device)
        assert not torch.equal(end.cpu(), value), f"{turn.name} left {name} where it was"
        of_ranks = [torch.empty_like(end) for _ in range(turn.world.size)]
        dist.all_gather(of_ranks, end)
        assert all(torch.equal(end, other) for other in of_ranks), f"{turn.name}'s ranks differ in {name}"


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
