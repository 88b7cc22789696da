"""Opens the default process group of torch.distributed, and closes it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from samestep.errors import LostPeer, UserError, say
from samestep.message import message
from samestep.rank.membership import Membership, in_time, leave_together, says_lost
from samestep.rank.threaded_group import active_turns, threaded_group
from samestep.records.launch_request import LaunchRequest
from samestep.records.record import attempt
from samestep.world import World, network
from samestep.world.heartbeat import ENDING, heartbeat
from samestep.world.mesh import Mesh
from samestep.world.regular_files import remove_file

TIMEOUT_S = 120.0  # of a collective; --timeout sets another
INIT_METHOD = "SAMESTEP_INIT_METHOD"  # environment variable: the rendezvous URL; unset: MASTER_ADDR and MASTER_PORT
RUN = "SAMESTEP_RUN"  # environment variable: an id that separates this run from others in the same store
SETTLE_S = 2.0  # after the timeout, for torch to raise its own error

_open_store: list[Store] = []  # the open group's rendezvous store; a graceful stop uses it too
_trainings = count()  # the same on every rank, for the names in the store


@contextmanager
def process_group(world: World, request: LaunchRequest | None = None, backend: str = "") -> Iterator[None]:
    """Opens the default process group for `world`, and closes it after the block. A nested block does nothing.

    request: what this rank's command was asked, to compare with the others'. backend: of torch.distributed; '': the
    world's. Raises UserError when a rank does not join in time or its command differs from rank 0's, LostPeer when a
    rank is lost while the block runs.
    """
    if dist.is_initialized():
        with nullcontext() if _open_store else _adopted(world, request):
            yield
        return
    if turns := active_turns():
        _own_gpu(world)  # a thread begins with the first GPU
        with threaded_group(world, turns) as store:
            _open_store[:] = [store]  # until the process ends: the other ranks meet in it, too
            yield
        return
    name, device = backend or world.backend, _own_gpu(world)
    url = os.environ.get(INIT_METHOD, "env://")
    host = urlsplit(url).hostname or os.environ.get("MASTER_ADDR", "127.0.0.1")
    timeout = timedelta(seconds=_timeout_s())
    if world.local_size < world.size:
        network.addresses(host, timeout.total_seconds())  # of the master, whose name may not be known yet
    chosen = network.choose(os.environ, host if world.local_size < world.size else "127.0.0.1")
    if chosen:
        say(chosen)
    if world.local_size < world.size:
        network.check_chosen(os.environ, host)
    members: Membership | None = None
    began = time.monotonic()
    try:
        store = _store(url, world, timeout)
        store.set_timeout(timeout)
        members = Membership(store, world, request)
        members.read()
        group = PrefixStore("group", store)

        def join() -> None:
            if device:
                torch.cuda.set_device(device)
            dist.init_process_group(
                name, store=group, rank=world.rank, world_size=world.size, timeout=timeout, device_id=device
            )

        in_time(timeout.total_seconds() + SETTLE_S, join)  # gloo ignores the timeout while it connects
    except (dist.DistError, RuntimeError, OSError) as error:
        raise _join_error(url, members, time.monotonic() - began, error) from error
    _open_store.append(store)
    file = url.removeprefix("file://")
    opened = _inode(file)
    with _naming_the_lost(members, world):
        yield
    _open_store.clear()
    if _inode(file) == opened:
        _leave(store, members, timeout)
    else:  # the folder of the file has been removed: the ranks no longer find each other
        dist.barrier()
    if file != url and world.rank == 0:
        remove_file(Path(file))  # a launcher's next command may use the same name
    # No `finally`: after an error the other ranks may not answer, and destroying the group could wait for them.
    dist.destroy_process_group()


def _inode(file: str) -> int | None:
    """Returns a file's number in its file system; None where there is no such file."""
    try:
        return os.stat(file).st_ino
    except OSError:
        return None


def _leave(store: Store, members: Membership, timeout: timedelta) -> None:
    """Waits for the other ranks' last collective, before this rank closes its connections."""
    world, ending = members.world, PrefixStore("ending", store)
    heartbeat.begin(ENDING)  # another rank may write its weights for longer than the watchdog waits
    leave_together(
        ending, world.size, holds_store=world.rank == 0, wait_s=timeout.total_seconds(), failed=members.any_failed
    )


@contextmanager
def _adopted(world: World, request: LaunchRequest | None) -> Iterator[None]:
    """Uses the default process group that the program around this one has opened, as Ray Train does, and closes."""
    _own_gpu(world)
    store = PrefixStore("samestep", dist.distributed_c10d._get_default_store())
    members = Membership(store, world, request)
    members.read()
    _open_store.append(store)
    try:
        with _naming_the_lost(members, world):
            yield
        _leave(store, members, timedelta(seconds=_timeout_s()))
    finally:
        _open_store.clear()


@contextmanager
def _naming_the_lost(members: Membership, world: World) -> Iterator[None]:
    """Raises LostPeer for an error of torch's that only says that another rank is gone; tells the others of any other
    error."""
    try:
        yield
    except LostPeer:
        members.give_up()
        raise
    except BaseException as error:
        heartbeat.begin(ENDING)  # asking the others takes seconds, in which the watchdog must not blame this rank
        if world.size > 1 and says_lost(error):
            raise members.lost(error) from error
        members.failed(f"{type(error).__name__}: {error}".splitlines()[0])
        raise


def _timeout_s() -> float:
    """Returns the timeout of collectives, in seconds."""
    return float(os.environ.get("SAMESTEP_TIMEOUT_S", TIMEOUT_S))


def _own_gpu(world: World) -> torch.device | None:
    """Makes this rank's GPU the current one; None on a CPU."""
    if world.device == "cpu":
        return None
    device = torch.device(world.device)
    torch.cuda.set_device(device)
    return device


def stop_store() -> Store | None:
    """Returns the store in which ranks agree on a graceful stop; None without an open group."""
    return PrefixStore("stop", _open_store[0]) if _open_store else None


def export_store() -> Store | None:
    """Returns the store in which ranks wait for rank 0's export; None without an open group."""
    return PrefixStore("export", _open_store[0]) if _open_store else None


def collectives_store() -> Store | None:
    """Returns a store in which ranks exchange the results of their collectives; None without an open group."""
    return PrefixStore(f"collectives {next(_trainings)}", _open_store[0]) if _open_store else None


def checkpoint_store() -> Store | None:
    """Returns a store in which the ranks of one training agree on its checkpoints; None without an open group."""
    return PrefixStore(f"checkpoints {next(_trainings)}", _open_store[0]) if _open_store else None


def _store(url: str, world: World, timeout: timedelta) -> Store:
    """Returns this run's rendezvous store at `url`: file://PATH, tcp://HOST:PORT or env://."""
    file = url.removeprefix("file://")  # not parsed: a folder's name may hold characters that a URL must not
    if file != url:
        return FileStore(file, world.size)
    store: Store
    if address := _served_at(url, world):
        listening = network.bound(*address)  # torch's own socket would listen on every interface
        store = TCPStore(
            *address, world.size, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    else:
        store = next(iter(rendezvous(url, world.rank, world.size, timeout=timeout)))[0]
    _check_run(store, url)
    # torchrun's store outlives a restart: restarted ranks must not read the addresses of the dead ones. And a rank
    # that connects to another run's store must not find that run's ranks.
    return PrefixStore(f"{os.environ.get(RUN, '')} attempt {attempt()}", store)


def _served_at(url: str, world: World) -> tuple[str, int] | None:
    """Returns (host, port) where this rank serves the store for all; None where another rank, or torchrun, does.

    None, too, for a host that leads to this machine alone here, as by a line in /etc/hosts, where other machines reach
    it by another address: torch listens on every interface.
    """
    if world.rank:
        return None
    parsed = urlsplit(url)
    if parsed.scheme == "tcp":
        return (parsed.hostname, parsed.port) if parsed.hostname and parsed.port else None
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not host or not port.isdecimal():
        return None
    outside = world.local_size < world.size and all(map(network.is_loopback, network.addresses(host)))
    return None if outside else (host, int(port))


def _check_run(store: Store, url: str) -> None:
    """Raises UserError where the ranks of another run meet in this store."""
    run = os.environ.get(RUN) or "alone"
    first = store.compare_set("samestep/run", "", run).decode()
    if first != run:
        raise UserError(message("ranks_of_another_run_meet_there", run=first, address=_shown(url)))


def _shown(url: str) -> str:
    """Returns the address of a rendezvous, for an error."""
    return url if url != "env://" else f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _join_error(url: str, members: Membership | None, seconds: float, error: Exception) -> Exception:
    """Returns the error for a group that not all ranks have joined. members: None where there is no store."""
    address = _shown(url)
    if members is None:
        detail = str(error).splitlines()[0][:200]
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            port = urlsplit(url).port or int(os.environ.get("MASTER_PORT", "0"))
            return UserError(message("rendezvous_port_taken", address=address, by=network.port_taken(port)))
        return UserError(message("rendezvous_not_reached", address=address, seconds=round(seconds), error=detail))
    try:
        absent = members.missing()
    except Exception:
        return members.lost(error)
    if not absent:
        return members.lost(error)
    return UserError(
        message("ranks_did_not_join", ranks=absent, size=members.world.size, address=address, seconds=round(seconds))
    )


def device_mesh(world: World, axes: tuple[str, ...]) -> DeviceMesh:
    """Returns torch's mesh of all ranks. axes: its dimensions, the outermost first."""
    sizes = tuple(getattr(world.mesh or Mesh(), axis) for axis in axes)
    return init_device_mesh(world.device.partition(":")[0], sizes, mesh_dim_names=axes)
