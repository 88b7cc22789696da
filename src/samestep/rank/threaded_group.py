"""Ranks as threads of one process, over the process group that torch's own tests use for it. They take turns.

A rank runs until it waits for other ranks in a collective; then the next one runs. So the ranks come in the same order
at every start, none disturbs another, and each has for itself what a process has once (PER_PROCESS): random generators,
default dtype, flags, environment variables, output, heartbeat. Ranks that wait for each other are found at once.
On GPUs, of which one may have several ranks, a collective begins when all that its ranks have queued is computed. Their
backward passes run in their own threads: torch's would run all of a GPU's in one, which has no rank.
The group is private to torch; tests/rank/test_threaded_group.py says what to do when it moves.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce, wraps
from operator import eq
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore, ReduceOp, Store, Work
from torch.backends import cuda as attention
from torch.backends import cudnn

from samestep.data.loader import GENERATORS, same_state
from samestep.errors import TrainingFailed
from samestep.message import Message, message
from samestep.rank.traffic import count_sent, count_threaded
from samestep.world import RANK_VARIABLES, World
from samestep.world.heartbeat import heartbeat

Given = ParamSpec("Given")
Result = TypeVar("Result")
THREAD = "samestep rank "  # and the rank: a thread's name


class PerProcess(NamedTuple):
    """What a process has once, and each rank needs for itself. It is written where it is not the same: that takes time,
    and torch may be told to let nobody set its flags."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    same: Callable[[Any, Any], bool] = eq


def _environment() -> dict[bytes, bytes]:
    # Its bytes: os.environ decodes each variable, which takes as long as a small operation.
    variables: dict[bytes, bytes] = vars(os.environb)["_data"]
    return variables.copy()


def _set_environment(variables: Mapping[bytes, bytes]) -> None:
    before = _environment()
    for name in before.keys() - variables.keys():
        del os.environb[name]
    os.environb.update({name: value for name, value in variables.items() if before.get(name) != value})


def _set_streams(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


def _flag(owner: Any, name: str) -> PerProcess:
    """Returns a flag that is an attribute."""
    return PerProcess(partial(getattr, owner, name), partial(setattr, owner, name))


def _gpu_states() -> list[Tensor]:
    """Returns the states of the GPUs' random generators."""
    return [gpu.get_state() for gpu in torch.cuda.default_generators] if torch.cuda.is_initialized() else []


def _set_gpu_states(states: Sequence[Tensor]) -> None:
    for gpu, state in zip(torch.cuda.default_generators, states):
        gpu.set_state(state)


def _same_gpu_states(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


DTENSOR_RANDOM = "torch.distributed.tensor._random"  # the first use of its tracker is a collective


def _tracker() -> Any:
    return getattr(sys.modules.get(DTENSOR_RANDOM), "_rng_tracker", None)


def _set_tracker(tracker: Any) -> None:
    if DTENSOR_RANDOM in sys.modules:
        vars(sys.modules[DTENSOR_RANDOM])["_rng_tracker"] = tracker


PER_PROCESS = (
    *(PerProcess(generator.state, generator.restore, same_state) for generator in GENERATORS.values()),
    PerProcess(_gpu_states, _set_gpu_states, _same_gpu_states),
    PerProcess(_tracker, _set_tracker),
    PerProcess(torch.get_default_dtype, torch.set_default_dtype),
    PerProcess(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    PerProcess(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    PerProcess(attention.flash_sdp_enabled, attention.enable_flash_sdp),
    PerProcess(attention.math_sdp_enabled, attention.enable_math_sdp),
    PerProcess(attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp),
    PerProcess(attention.cudnn_sdp_enabled, attention.enable_cudnn_sdp),
    _flag(cudnn, "benchmark"),
    _flag(cudnn, "deterministic"),
    PerProcess(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    PerProcess(_environment, _set_environment),
    PerProcess(lambda: (sys.stdout, sys.stderr), _set_streams),
    # Files of the same numbers are not the same file: memory views are equal by what they hold.
    PerProcess(
        lambda: {**vars(heartbeat)}, vars(heartbeat).update, lambda first, second: first["_cells"] is second["_cells"]
    ),
)


def _read() -> list[Any]:
    """Returns what each rank needs for itself, as the process has it now."""
    return [part.read() for part in PER_PROCESS]


class Wait(NamedTuple):
    """What a rank waits for. collective: its name, as 'AllReduce'."""

    is_over: Callable[[], bool]
    collective: str


@dataclass
class Channel:
    """What one rank sends another, by the number of the send, until it is received. sends, receives: how many there
    were: the first receive is of the first send, whichever is waited for first."""

    tensors: dict[int, list[Tensor]] = field(default_factory=dict)
    sends: int = 0
    receives: int = 0


class Received(Work):
    """A tensor that another rank sends: wait() lets the others run until it is there, and copies it."""

    def __init__(self, turns: Turns, channel: Channel, into: list[Tensor], name: str) -> None:
        super().__init__()
        self._turns, self._channel, self._into, self._name = turns, channel, into, name
        self._number, self._is_over = channel.receives, False
        channel.receives += 1

    def wait(self, timeout: Any = None) -> bool:
        if not self._is_over:
            self._turns.wait(lambda: self._number in self._channel.tensors, self._name)
            for tensor, value in zip(self._into, self._channel.tensors.pop(self._number)):
                if tensor.numel() != value.numel() or tensor.dtype != value.dtype:
                    shapes = [f"{list(given.shape)} {given.dtype}" for given in (value, tensor)]
                    raise TrainingFailed(message("rank_receives_another_tensor", sent=shapes[0], received=shapes[1]))
                tensor.detach().copy_(value.reshape(tensor.shape))
            self._turns.wait_for_gpus()  # otherwise the memory of `value` could be used again while it is copied
            self._is_over = True
        return True

    def is_completed(self) -> bool:
        return self._is_over


class Sent(Work):
    """A tensor that has been sent: nothing is waited for."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Turns:
    """The turns of `size` ranks, threads of this process. running: the rank whose turn it is. gpus: those that the
    ranks share."""

    def __init__(self, size: int, gpus: Sequence[str] = ()) -> None:
        self.size, self.running, self._gpus = size, size - 1, gpus
        if gpus:
            torch.cuda.init()  # before the first rank's turn: what it draws must not be seeded by another's
        self.store = HashStore()
        self.threads: list[threading.Thread] = []
        self._may_run = [threading.Semaphore(0) for _ in range(size)]
        self._waits = {rank: Wait(lambda: True, "") for rank in range(size)}
        self._at_start = self._found = _read()
        self._states = {rank: self._at_start for rank in range(size)}
        self._deadlock: Message | None = None
        self._over = threading.Event()
        self._code = 0
        self._alike: list[Any] = []  # what the ranks have asked alike() for
        self._asked = [0] * size
        self._computes = False

    def run(self, rank_main: Callable[[], int]) -> int:
        """Calls `rank_main` in a thread for each rank, and returns the exit code of the first rank that fails, or 0.

        Call it once. After a failure the process has to end: the other ranks' threads wait for ever.
        """
        for rank in range(self.size):
            thread = threading.Thread(target=self._rank, args=(rank, rank_main), name=f"{THREAD}{rank}", daemon=True)
            self.threads.append(thread)
            thread.start()
        with _taking_turns(self):
            self._next()
            self._over.wait()
        self._become(self._at_start)
        return self._code

    def _rank(self, rank: int, rank_main: Callable[[], int]) -> None:
        self._take_turn(rank)
        os.environ.pop(RANK_VARIABLES, None)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)}
        self._code = 1
        try:
            with torch.autograd.set_multithreading_enabled(False):  # set for this thread alone
                self._code = rank_main()
        finally:
            self._found = _read()
            if self._code:
                self._over.set()  # no other rank runs again
            else:
                self._next()

    def wait(self, is_over: Callable[[], bool], collective: str) -> None:
        """Lets other ranks run until the running one's wait is over. Raises TrainingFailed where it never will be."""
        if is_over():
            return
        rank = self.running
        self._waits[rank] = Wait(is_over, collective)
        self._states[rank] = self._found = _read()
        self._next()
        self._take_turn(rank)
        if self._deadlock:
            raise TrainingFailed(self._deadlock)

    def alike(self, compute: Callable[[], Result]) -> Result:
        """Returns what `compute` returns on the first rank that asks; every rank asks for the same in the same order.

        compute: must wait for no other rank.
        """
        if self._computes:  # a part of what another call computes, which other ranks do not ask for
            return compute()
        number = self._asked[self.running]
        self._asked[self.running] += 1
        if number == len(self._alike):
            self._computes = True
            try:
                self._alike.append(compute())
            finally:
                self._computes = False
        result: Result = self._alike[number]
        if min(self._asked) > number:  # no other rank will ask: it may hold a model's state
            self._alike[number] = None
        return result

    def wait_for_gpus(self) -> None:
        """Waits until the GPUs have computed what any rank has queued, on whatever stream; on a CPU for nothing."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def _take_turn(self, rank: int) -> None:
        self._may_run[rank].acquire()
        del self._waits[rank]
        self.running = rank
        self._become(self._states.pop(rank))

    def _become(self, state: Sequence[Any]) -> None:
        """Gives the process a rank's state. `_found` is the state that the rank which ran before has left."""
        for part, value, found in zip(PER_PROCESS, state, self._found):
            if not part.same(found, value):
                part.write(value)

    def _next(self) -> None:
        """Gives the turn to the next rank that can run."""
        if not self._waits:
            self._over.set()
            return
        in_turn = ((self.running + further) % self.size for further in range(1, self.size + 1))
        able = next((rank for rank in in_turn if rank in self._waits and self._waits[rank].is_over()), None)
        if able is None:
            self._deadlock = self._why_stuck()
        self._may_run[min(self._waits) if able is None else able].release()

    def _why_stuck(self) -> Message:
        """Returns in which collectives the ranks wait for each other, and which have ended."""
        ranks_in: dict[str, list[int]] = {}
        for rank in sorted(self._waits):
            ranks_in.setdefault(self._waits[rank].collective, []).append(rank)
        waiting = [message("ranks_wait_in_collective", ranks=ranks_in[name], collective=name) for name in ranks_in]
        ended = sorted(set(range(self.size)) - set(self._waits))
        return message("threads_wait_for_each_other", waiting=waiting, ended=ended)

    def stacks(self) -> dict[int, str]:
        """Returns each living rank's stack, as faulthandler writes it."""
        frames = sys._current_frames()
        alive = {rank: thread.ident for rank, thread in enumerate(self.threads) if thread.ident in frames}
        return {rank: _stack(frames[ident]) for rank, ident in alive.items() if ident is not None}


def _stack(frame: FrameType | None) -> str:
    lines = ["Stack (most recent call first):"]
    while frame:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) + "\n"


_active: list[Turns] = []  # while the ranks of this process are threads


def active_turns() -> Turns | None:
    """Returns the turns of this process's ranks; None where its rank is the process."""
    return _active[0] if _active else None


def alike_on_ranks(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Lets a function that returns the same on all ranks be computed once where they are threads of one process. They
    share what it returns."""

    @wraps(function)
    def computed(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        turns = active_turns()
        return turns.alike(partial(function, *args, **kwargs)) if turns else function(*args, **kwargs)

    return computed


@contextmanager
def threaded_group(world: World, turns: Turns) -> Iterator[Store]:
    """Opens the default process group of the running rank, and closes it after the block. Returns its store."""
    dist.init_process_group("threaded", rank=world.rank, world_size=world.size, store=turns.store)
    yield turns.store
    dist.destroy_process_group()


@contextmanager
def _taking_turns(turns: Turns) -> Iterator[None]:
    """Makes torch's threaded group wait by turns instead of with locks, and add in the order of the ranks."""
    from torch.testing._internal.distributed import multi_threaded_pg

    torchs: Any = multi_threaded_pg
    if not hasattr(torchs.ThreadLocalWorld, "comms"):
        torchs.ThreadLocalWorld.comms = []  # torch 2.11 empties it at the group's end, and has left it out

    class Collective(multi_threaded_pg.Collective):
        ranks: list[int]  # of the group

        def join(self, rank: int, data: Any) -> Any:
            self._data[rank] = data
            self._count += 1
            count_threaded(self._collective, data, self.ranks, rank)
            if self._count == self._world_size:
                turns.wait_for_gpus()
                self._collective.work(self._data)
                turns.wait_for_gpus()
                self._done = True
            turns.wait(lambda: bool(self._done), type(self._collective).__name__)
            return torchs.ret_work(data)

    original = torchs.ProcessLocalGroup.__dict__["_start_coll"]

    def started(cls: Any, collective: Any, group: Any) -> Any:
        joined = original.__func__(cls, collective, group)
        joined.ranks = dist.get_process_group_ranks(group)
        called, entered = (type(operation).__name__ for operation in (collective, joined._collective))
        if called != entered or vars(collective) != vars(joined._collective):
            waiting = [rank for rank, data in enumerate(joined._data) if data is not None]
            fields = {"rank": turns.running, "called": called, "waiting": waiting, "entered": entered}
            raise TrainingFailed(message("rank_calls_another_collective", **fields))
        return joined

    def all_created(rank: int, store: Store, name: str, size: int, *_: Any) -> None:
        store.add("created", 1)
        turns.wait(lambda: store.add("created", 0) >= size, "new_group")

    def in_rank_order(tensors: list[Tensor]) -> Tensor:
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
            shapes = [f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors]
            raise TrainingFailed(message("ranks_sum_different_tensors", shapes=[*dict.fromkeys(shapes)]))
        return reduce(torch.add, tensors)

    channels: defaultdict[tuple[str, int, int, int], Channel] = defaultdict(Channel)

    def send(group: Any, tensors: list[Tensor], dst: int, tag: int = 0) -> Sent:
        channel = channels[group.pg_name, group.rank(), dst, tag]
        count_sent(tensors, dist.get_process_group_ranks(group))
        channel.tensors[channel.sends] = [tensor.detach().clone() for tensor in tensors]
        turns.wait_for_gpus()
        channel.sends += 1
        return Sent()

    def receive(group: Any, tensors: list[Tensor], sender: int, tag: int = 0) -> Received:
        channel = channels[group.pg_name, sender, group.rank(), tag]
        return Received(turns, channel, tensors, f"recv from rank {sender}")

    torchs.ProcessLocalGroup.send, torchs.ProcessLocalGroup.recv = send, receive  # which torch's has not
    before = torchs.Collective, torchs._store_based_barrier, torchs._reduce_ops[ReduceOp.SUM]
    torchs.Collective, torchs._store_based_barrier = Collective, all_created
    torchs._reduce_ops[ReduceOp.SUM] = in_rank_order
    torchs.ProcessLocalGroup._start_coll = classmethod(started)
    isolate: Callable[[bool], None] = _distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    torchs._install_threaded_pg()
    _active.append(turns)
    try:
        yield
    finally:
        _active.clear()
        torchs.ProcessLocalGroup.reset()
        del torchs.ProcessLocalGroup.send, torchs.ProcessLocalGroup.recv
        torchs._uninstall_threaded_pg()
        isolate(False)
        torchs.Collective, torchs._store_based_barrier, torchs._reduce_ops[ReduceOp.SUM] = before
        torchs.ProcessLocalGroup._start_coll = original
