"""The default process group of torch.distributed, opened once and closed by whoever opened it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from samestep.errors import LostPeer, UserError
from samestep.rank.membership import Membership, in_time, names, says_lost
from samestep.world import World, network

TIMEOUT_S = 120.0  # a rank that waits so long in a collective gives up; --timeout says otherwise
MEETING = "SAMESTEP_INIT_METHOD"  # the environment's name for where the ranks meet; torchrun's own address where none

RUN = "SAMESTEP_RUN"  # the environment's name for what tells this run from others at the same meeting
SETTLE_S = 2.0  # after the timeout, for whoever waits to end by itself

_meeting: list[Store] = []  # of the open group; what graceful stops agree in


@contextmanager
def process_group(world: World) -> Iterator[None]:
    """Joins the group of `world`; inside another such block it joins nothing and closes nothing.

    Raises UserError when not all ranks come, LostPeer when one goes while the block runs.
    """
    if dist.is_initialized():
        yield
        return
    device = None
    if world.device != "cpu":
        device = torch.device(world.device)
        torch.cuda.set_device(device)
    meeting = os.environ.get(MEETING, "env://")
    host = urlsplit(meeting).hostname or os.environ.get("MASTER_ADDR", "127.0.0.1")
    said = network.choose(os.environ, host if world.local_size < world.size else "127.0.0.1")
    if said:
        print(f"samestep: {said}", flush=True)
    timeout = timedelta(seconds=float(os.environ.get("SAMESTEP_TIMEOUT_S", TIMEOUT_S)))
    roll: Membership | None = None
    began = time.monotonic()
    try:
        store = _store(meeting, world, timeout)
        store.set_timeout(timeout)
        roll = Membership(store, world)
        group = PrefixStore("group", store)

        def meet() -> None:
            if device:
                torch.cuda.set_device(device)
            dist.init_process_group(
                world.backend, store=group, rank=world.rank, world_size=world.size, timeout=timeout, device_id=device
            )

        in_time(timeout.total_seconds() + SETTLE_S, meet)  # gloo heeds no timeout while it connects
        roll.read()
    except (dist.DistError, RuntimeError, OSError) as error:
        raise _not_met(meeting, roll, time.monotonic() - began, error) from error
    _meeting.append(store)
    try:
        yield
    except LostPeer:
        raise
    except Exception as error:
        if world.size > 1 and says_lost(error):
            raise roll.lost(error) from error
        roll.failed(f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    _meeting.clear()
    file = meeting.removeprefix("file://")
    if file != meeting and world.size > 1:
        dist.barrier()  # all have read what the file told; a launcher's next command may meet at the same name
        if world.rank == 0:
            Path(file).unlink(missing_ok=True)
        dist.barrier()
    # No `finally`: after an error the others may never answer, and destroying the group could wait for them.
    dist.destroy_process_group()


def meeting_store() -> Store | None:
    """The store of the open group; None where this process is alone."""
    return PrefixStore("stop", _meeting[0]) if _meeting else None


def _store(meeting: str, world: World, timeout: timedelta) -> Store:
    file = meeting.removeprefix("file://")  # a store, not a URL: a folder's name may hold what a URL must not
    if file != meeting:
        return FileStore(file, world.size)
    at = urlsplit(meeting)
    store: Store
    if at.scheme == "tcp" and world.rank == 0 and at.hostname and at.port:
        listening = network.bound(at.hostname, at.port)  # torch's own would listen on every interface
        store = TCPStore(
            at.hostname, at.port, world.size, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    else:
        store = next(iter(rendezvous(meeting, world.rank, world.size, timeout=timeout)))[0]
    # torchrun's store outlives a restart: ranks that started again must not read where the dead ones listened. And a
    # rank that comes to another run's store must find nobody there.
    return PrefixStore(f"{os.environ.get(RUN, '')} attempt {attempt()}", store)


def attempt() -> str:
    """How often torchrun has started these ranks again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _not_met(meeting: str, roll: Membership | None, seconds: float, error: Exception) -> Exception:
    """What to tell a user whose ranks did not all come to the meeting."""
    at = meeting
    if meeting == "env://":
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if roll is None:
        said = str(error).splitlines()[0][:200]
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return UserError(
                f"{at}, where the ranks were to meet, is taken by another process of this machine; end that, or choose "
                "another port"
            )
        return UserError(
            f"{at}, where the ranks meet, cannot be reached within {seconds:.0f} s ({said}); see that rank 0 runs "
            "there, that the name is right and that the port is open between the machines"
        )
    try:
        absent = roll.missing()
    except Exception:
        return roll.lost(error)
    if not absent:
        return roll.lost(error)
    return UserError(
        f"{names(absent)} of {roll.world.size} did not come to {at} within {seconds:.0f} s; start every machine with "
        "the same line, and see that the machines can reach one another"
    )
