"""The default process group of torch.distributed, opened once and closed by whoever opened it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from samestep.world import World

TIMEOUT_S = 120  # a rank that waits so long in a collective gives up; the launcher then ends the others


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Joins the group of `world`; inside another such block it joins nothing and closes nothing.

    The rendezvous is torchrun's environment, or the address in SAMESTEP_INIT_METHOD.
    """
    if dist.is_initialized():
        yield
        return
    device = None
    if world.device != "cpu":
        device = torch.device(world.device)
        torch.cuda.set_device(device)
    meeting = os.environ.get("SAMESTEP_INIT_METHOD", "env://")
    file = meeting.removeprefix("file://")  # a store, not a URL: a folder's name may hold what a URL must not
    dist.init_process_group(
        world.backend,
        init_method=None if file != meeting else meeting,
        store=FileStore(file, world.size) if file != meeting else None,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device,
    )
    yield  # no `finally`: after an error the others may never answer, and destroying the group could wait for them
    dist.destroy_process_group()
