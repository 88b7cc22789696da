"""split: one process that drives several devices, the model's layers in order on the first, the second, …

stages: how many devices; None: all of this machine, and on a CPU two that are the same one. at: the names of the layers
with which the next device begins, as in 'encoder.layer.4,encoder.layer.8'; '': parts of about equal weights.
in_flight: micro-batches whose forward passes are queued before their backward passes, so that devices work at once.
On a CPU it gains nothing: it is there to try a split, and to prove it.
Source: https://github.com/pytorch/tutorials/blob/main/intermediate_source/model_parallel_tutorial.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from samestep.engine import Checks, Engine, Layout, Needs, State
from samestep.errors import UserError, first_few, nearest
from samestep.job import Batch, Job
from samestep.job.walk import mapped_tensors
from samestep.message import Message, message
from samestep.rank.step import default_generator
from samestep.training import Run
from samestep.world import World


def layout(world: World, stages: int | None = None, in_flight: int = 1, **settings: Any) -> Layout:
    if stages is not None and stages < 1:
        raise UserError(f"--set-engine split.stages={stages}: it must be at least 1, the number of devices")
    if in_flight < 1:
        raise UserError(f"--set-engine split.in_flight={in_flight}: it must be at least 1 micro-batch")
    return Layout(replicas=1, closures=True)


def check(model: nn.Module, stages: int | None = None, at: str = "", **settings: Any) -> None:
    """Raises UserError for more stages than layers, and for a name that is not a layer's."""
    if stages is not None and at:
        raise UserError("--set-engine split.stages and split.at both say where the model is cut; leave one out")
    if stages is not None and stages > len(layers_of(model)):
        layers = [*layers_of(model)]
        raise UserError(
            f"--set-engine split.stages={stages}: the model has {len(layers)} layers to put on devices "
            f"({first_few(layers)}); give fewer stages"
        )
    starts_of(model, 1, at)


def explain(error: BaseException, job: Job) -> Message | None:
    """Returns a message about tensors on different devices; None for other errors."""
    return message("forward_joins_tensors_of_different_devices") if "same device" in str(error) else None


def train(job: Job, world: World, run: Run, *, stages: int | None = None, at: str = "", in_flight: int = 1) -> State:
    model = job.model()
    devices = devices_of(world, at.count(",") + 2 if at else stages)
    split = Split(model, devices, starts_of(model, len(devices), at))
    optimizer = job.optimizer.build(model)
    scheduler = job.lr_scheduler(optimizer)
    run.register(model, optimizer, scheduler=scheduler)
    waiting: list[Tensor] = []  # the losses of the micro-batches in flight

    def backward(batch: Batch) -> Tensor:
        split.at = devices[0]  # where the random stream of this micro-batch begins
        loss = run.loss(model, batch)
        waiting.append(loss)
        if batch.completes_step or len(waiting) == in_flight:
            for loss_in_flight in waiting:
                loss_in_flight.backward()
            waiting.clear()
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
    return model.state_dict()


def devices_of(world: World, stages: int | None) -> list[torch.device]:
    """Returns the device of each stage: those of this process in turn."""
    count = stages or max(2, len(world.devices))
    return [torch.device(world.devices[number % len(world.devices)]) for number in range(count)]


class Split:
    """Puts a model's layers on devices. What goes into a layer is moved to its device, what comes out of the model to
    the first.

    The random stream goes along, so that dropout draws what it draws on one device. Layers that share a parameter stay
    on one device. at: the device where the random stream is.
    """

    def __init__(self, model: nn.Module, devices: list[torch.device], starts: list[str]) -> None:
        model.to(devices[0])
        self.at, stage = devices[0], 0
        layers = layers_of(model)
        inside = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
        place = {id(parameter): devices[0] for parameter in model.parameters() if id(parameter) not in inside}
        for name, layer in layers.items():
            stage += name in starts
            tied = [place[id(parameter)] for parameter in layer.parameters() if id(parameter) in place]
            device = tied[0] if tied else devices[stage]
            place |= {id(parameter): device for parameter in layer.to(device).parameters()}
            layer.register_forward_pre_hook(partial(self._enter, device), with_kwargs=True)
        model.register_forward_hook(partial(self._leave, devices[0]))

    def _enter(self, device: torch.device, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._take_stream(device)
        return moved(args, device), moved(kwargs, device)

    def _leave(self, device: torch.device, model: nn.Module, args: Any, output: Any) -> Any:
        self._take_stream(device)
        return moved(output, device)

    def _take_stream(self, device: torch.device) -> None:
        if device != self.at and device.type == self.at.type:
            default_generator(str(device)).set_state(default_generator(str(self.at)).get_state())
        self.at = device


def moved(data: Any, device: torch.device) -> Any:
    """Returns nested data with its tensors on a device."""
    return mapped_tensors(lambda tensor: tensor.to(device, non_blocking=True), data)


def starts_of(model: nn.Module, stages: int, cuts: str) -> list[str]:
    """Returns the names of the layers with which the second stage begins, and the third, … Raises UserError for a name
    in `cuts` that is not a layer's, or not in the model's order."""
    sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in layers_of(model).items()}
    starts: list[str] = []
    for name in cuts.split(",") if cuts else ():
        later = [*sizes][[*sizes].index(starts[-1]) + 1 :] if starts else [*sizes][1:]
        if name not in later:
            raise UserError(f"--set-engine split.at={cuts}: {name} is not a later layer; {nearest(name, later)}")
        starts.append(name)
    placed, total = 0.0, sum(sizes.values())
    for number, (name, size) in enumerate(() if cuts else sizes.items()):
        stage, left = len(starts), len(sizes) - number
        is_due = placed + size / 2 >= total * (stage + 1) / stages  # the layer's middle lies in the next part
        if number and stage < stages - 1 and (is_due or left < stages - stage):
            starts.append(name)
        placed += size
    return starts


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns what can be on a device of its own, in the model's order: its children; instead of a list of modules, and
    of a module that holds a list of blocks, what is in it."""
    found: dict[str, nn.Module] = {}

    def add(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if is_list(child) or (not is_block(child, module) and any(map(has_blocks, child.modules()))):
                add(child, f"{prefix}{name}.")
            elif child not in found.values():
                found[prefix + name] = child

    add(model, "")
    return found


def is_list(module: nn.Module) -> bool:
    """Returns whether a module only holds others: it has no forward, or that of Sequential."""
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def is_block(module: nn.Module, parent: nn.Module) -> bool:
    """Returns whether a module stands in a list with another of its class, and is made of modules."""
    alike = [child for child in parent.children() if type(child) is type(module)]
    return is_list(parent) and not is_list(module) and len(alike) > 1 and any(True for _ in module.children())


def has_blocks(module: nn.Module) -> bool:
    return any(is_block(child, module) for child in module.children())


ENGINE = Engine(
    purpose="one process, layers over its devices",
    train=train,
    layout=layout,
    needs=Needs(processes="one", no_threads=""),
    checks=Checks(settings=check, explain=explain),
)
