"""Ranks as threads: they take turns, each has what a process has once, and those that wait for each other are named."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.backends import cudnn
from torch.distributed.tensor import _random
from torch.testing._internal.distributed import multi_threaded_pg
from torch.utils.data import TensorDataset

from samestep import engine as engines
from samestep.errors import TrainingFailed
from samestep.jobs import digits
from samestep.launch import stacks
from samestep.message import as_said
from samestep.parallel.stage_forward import leave_absent
from samestep.rank import shards
from samestep.rank.evaluate import plain_model
from samestep.rank.shards import BLOCKS_BYTES
from samestep.rank.threaded_group import Turns, alike_on_ranks, threaded_group
from samestep.report.language import catalogue
from samestep.world import World
from samestep.world.heartbeat import LOADING, heartbeat, read

THREADABLE = {
    "single",
    "split",
    "dataparallel",
    "ddp",
    "fsdp",
    "zero",
    "amp",
    "tensor",
    "pipeline",
    "context",
    "expert",
}


def test_torch_has_the_group_that_the_ranks_use() -> None:
    """Its names are private, and may move with a version of torch. Where this fails: find the process group of threads
    that torch's own tests use (MultiThreadedTestCase in torch/testing/_internal), and change `_taking_turns` and
    `threaded_group` in src/samestep/rank/threaded_group.py, which alone name it. Where there is none any more, copy
    the class from the last torch that had it: it is Python."""
    collective = multi_threaded_pg.Collective(2, multi_threaded_pg.AllGather(), None)
    assert {"_data", "_count", "_world_size", "_collective", "_done"} <= {*vars(collective)}
    assert "_start_coll" in vars(multi_threaded_pg.ProcessLocalGroup)
    for name in ("_install_threaded_pg", "_uninstall_threaded_pg", "_store_based_barrier", "ret_work"):
        assert callable(getattr(multi_threaded_pg, name))
    assert dist.ReduceOp.SUM in multi_threaded_pg._reduce_ops
    assert dist.is_backend_available("threaded")
    assert callable(torch._C._distributed_c10d._set_thread_isolation_mode)  # type: ignore[attr-defined]


def on_threads(size: int, do: Callable[[int], object], gpus: Sequence[str] = ()) -> dict[int, object]:
    """What `do` returns on each rank, or the error that it raises."""
    turns, returned = Turns(size, gpus), dict[int, object]()

    def rank_main() -> int:
        rank = turns.running
        try:
            with threaded_group(World(rank, size), turns):
                returned[rank] = do(rank)
        except Exception as error:
            returned[rank] = error
            return 1
        return 0

    code = turns.run(rank_main)
    assert code == any(isinstance(value, Exception) for value in returned.values())
    return returned


def test_what_the_ranks_compute_alike_is_computed_once() -> None:
    computed: list[str] = []

    @alike_on_ranks
    def inner(what: str) -> str:
        computed.append(what)
        return what

    @alike_on_ranks
    def outer(what: str) -> str:
        return inner(f"{what}, inside")

    def do(rank: int) -> list[str]:
        first = outer("a")
        dist.all_reduce(torch.ones(1))
        return [first, inner("b"), outer("c")]

    assert on_threads(3, do) == {rank: ["a, inside", "b", "c, inside"] for rank in range(3)}
    assert computed == ["a, inside", "b", "c, inside"]
    assert inner("d") == inner("d") and computed[3:] == ["d", "d"]


def test_each_rank_has_what_a_process_has_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, stdout = torch.get_default_dtype(), sys.stdout

    def expected(rank: int) -> list[object]:
        numbers = np.random.RandomState(rank)
        drawn = torch.rand(2, generator=torch.Generator().manual_seed(rank)).tolist()
        return [drawn, random.Random(rank).random(), numbers.rand()]

    def do(rank: int) -> list[object]:
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        torch.set_default_dtype(torch.float64 if rank else torch.float32)
        torch.use_deterministic_algorithms(rank == 1)
        cudnn.benchmark, _random._rng_tracker = rank == 1, rank
        os.environ["SAMESTEP_TEST_RANK"] = str(rank)
        sys.stdout = open(tmp_path / str(rank), "w")  # noqa: SIM115 - closed below
        print("before")
        dist.all_reduce(torch.ones(1, dtype=torch.int64))
        print(f"after {os.environ['SAMESTEP_TEST_RANK']} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
        sys.stdout.close()
        assert torch.get_default_dtype() == (torch.float64 if rank else torch.float32)
        assert torch.are_deterministic_algorithms_enabled() == (rank == 1)
        assert (cudnn.benchmark, _random._rng_tracker) == (rank == 1, rank)
        return [torch.rand(2, dtype=torch.float32).tolist(), random.random(), np.random.rand()]

    assert on_threads(3, do) == {rank: expected(rank) for rank in range(3)}
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [
        f"before\nafter {rank} {rank} of 3\n" for rank in range(3)
    ]
    assert torch.get_default_dtype() == dtype and sys.stdout is stdout and "SAMESTEP_TEST_RANK" not in os.environ
    assert not torch.are_deterministic_algorithms_enabled() and not cudnn.benchmark and _random._rng_tracker is None


def test_each_rank_writes_its_own_heartbeat(tmp_path: Path) -> None:
    """Also while all of them have done the same so far, and their files hold the same numbers."""
    rounds = 5

    def do(rank: int) -> None:
        heartbeat.open(tmp_path / str(rank))
        for number in range(rounds):
            heartbeat.begin(LOADING, number)
            for _ in range(2):  # at the second one all of them have done the same
                dist.barrier()

    on_threads(3, do)
    pulses = [read(tmp_path / str(rank)) for rank in range(3)]
    assert [(pulse.beats, pulse.step) for pulse in pulses if pulse] == [(rounds, rounds - 1)] * 3


@pytest.mark.parametrize("blocks_bytes", [BLOCKS_BYTES, 8])
def test_absent_tensors_are_gathered_in_one_collective_or_in_several(
    blocks_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BLOCKS_BYTES", blocks_bytes)
    gathered: list[str] = []
    collectives = {name: getattr(dist, name) for name in ("all_gather", "_broadcast_coalesced")}
    for name, collective in collectives.items():
        noted = partial(
            lambda name, collective, *a, **k: (gathered.append(name), collective(*a, **k)), name, collective
        )
        monkeypatch.setattr(dist, name, noted)
    whole = Parts(7.0)

    def do(rank: int) -> list[bool]:
        model = Parts(float(rank))
        owners = {"first": 0, "second": 1, "flags": 1}
        leave_absent(model, lambda tensor: owners[named(model, tensor)] == rank)
        shards.gather_absent(model, owners, group=dist.group.WORLD, device="cpu")
        state, expected = model.state_dict(), [Parts(float(owners[name])).state_dict()[name] for name in owners]
        assert [*state] == [*whole.state_dict()]
        return [torch.equal(state[name], tensor) for name, tensor in zip(owners, expected)]

    assert on_threads(3, do) == {rank: [True] * 3 for rank in range(3)}
    assert {*gathered} == ({"all_gather"} if blocks_bytes == BLOCKS_BYTES else {"_broadcast_coalesced"})


class Parts(nn.Module):
    """Tensors of three dtypes and shapes, of which one has no dimension."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((3, 5), value, dtype=torch.float64))
        self.second = nn.Parameter(torch.tensor(value))
        self.register_buffer("flags", torch.tensor([value > 0, False]))


def named(model: nn.Module, tensor: torch.Tensor) -> str:
    return next(name for name, own in (*model.named_parameters(), *model.named_buffers()) if own is tensor)


def test_threads_with_rows_to_evaluate_build_a_model_with_rank_0s_weights() -> None:
    rows = TensorDataset(torch.zeros(9, 2), torch.zeros(9))
    job = replace(digits.job(), model=lambda: nn.Linear(2, 1), evaluation=rows, global_batch=5)  # two chunks

    def do(rank: int) -> list[float]:
        state = {"weight": torch.full((1, 2), float(rank + 1)), "bias": torch.zeros(1)}
        return [float(weight.sum()) for weight in plain_model(job, state, World(rank, 3)).parameters()]

    assert on_threads(3, do) == {0: [2.0, 0.0], 1: [2.0, 0.0], 2: []}


def test_backward_runs_in_the_ranks_own_thread() -> None:
    """In torch's thread of a GPU a collective of backward would wait for one of the same thread."""
    assert on_threads(2, lambda rank: torch._C._is_multithreading_enabled()) == {0: False, 1: False}
    assert torch._C._is_multithreading_enabled()


def test_flags_that_nobody_may_set_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    assert on_threads(2, lambda rank: dist.barrier()) == {0: None, 1: None}


def test_a_collective_of_gpus_waits_for_all_that_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here: what a rank asks of torch is recorded."""
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: waited.append("init"))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)

    def do(rank: int) -> None:
        dist.all_reduce(torch.ones(1))
        if rank:
            dist.recv(torch.zeros(1), src=0)
        else:
            dist.send(torch.ones(1), dst=1)

    on_threads(2, do, gpus=["cuda:0"])
    assert waited == ["init", *["cuda:0"] * 4]  # before and after the sum, of what is sent, and of what is received


def test_collectives_give_what_they_give_to_processes() -> None:
    values = [torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) for rank in range(5)]
    total = values[0].clone()
    for value in values[1:]:
        total += value

    def do(rank: int) -> tuple[bool, ...]:
        reduced, first, pieces = values[rank].clone(), values[rank].clone(), [torch.empty_like(total)] * 5
        dist.all_reduce(reduced)
        dist.broadcast(first, src=3)
        pieces = [torch.empty_like(total) for _ in range(5)]
        dist.all_gather(pieces, values[rank])
        names: list[object] = [None] * 5
        dist.all_gather_object(names, f"rank {rank}")
        return (
            torch.equal(reduced, total),
            torch.equal(first, values[3]),
            all(map(torch.equal, pieces, values)),
            names == [f"rank {n}" for n in range(5)],
        )

    assert on_threads(5, do) == {rank: (True,) * 4 for rank in range(5)}
    assert on_threads(1, lambda rank: dist.barrier()) == {0: None}


def test_ranks_that_wait_for_each_other_are_named() -> None:
    def leaves(rank: int) -> None:
        if rank != 1:
            dist.all_reduce(torch.ones(1))

    error = on_threads(3, leaves)[0]
    assert isinstance(error, TrainingFailed) and error.message.id == "threads_wait_for_each_other"
    (waiting,) = error.message.fields["waiting"]
    assert (waiting.fields, error.message.fields["ended"]) == ({"ranks": [0, 2], "collective": "AllReduce"}, [1])


def test_another_collective_is_an_error() -> None:
    def differs(rank: int) -> None:
        dist.broadcast(torch.ones(1), src=0) if rank == 2 else dist.all_reduce(torch.ones(1))

    (error,) = on_threads(3, differs).values()
    assert isinstance(error, TrainingFailed) and error.message.id == "rank_calls_another_collective"
    assert (error.message.fields["rank"] == 2) != (2 in error.message.fields["waiting"])
    (error,) = on_threads(2, lambda rank: dist.broadcast(torch.ones(1), src=rank)).values()
    assert isinstance(error, TrainingFailed) and error.message.id == "rank_calls_another_collective"
    (error,) = on_threads(2, lambda rank: dist.all_reduce(torch.ones(1 + rank))).values()
    assert isinstance(error, TrainingFailed) and error.message.id == "ranks_sum_different_tensors"


def test_a_rank_that_fails_ends_the_others() -> None:
    def fails(rank: int) -> None:
        if rank == 1:
            raise ValueError("on rank 1")
        dist.barrier()

    returned = on_threads(3, fails)
    assert [*returned] == [1] and str(returned[1]) == "on rank 1"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_before_a_rank_can_report_it_ends_all() -> None:
    def rank_main() -> int:
        raise OSError("no space left")

    assert Turns(2).run(rank_main) == 1


def test_each_rank_tells_where_it_is() -> None:
    turns, seen = Turns(2), list[dict[int, str]]()

    def rank_main() -> int:
        turns.wait(lambda: bool(seen), "something") if turns.running == 0 else seen.append(turns.stacks())
        return 0

    assert turns.run(rank_main) == 0
    ((text, other),) = [tuple(seen[0].values())]
    assert [stacks.parse(stack)[0][-1].function for stack in (text, other)] == ["_bootstrap"] * 2
    (waiting, *_) = stacks.parse(text)
    assert "rank_main" in {frame.function for frame in waiting}
    assert ("threaded_group.py", "wait") in {(Path(frame.file).name, frame.function) for frame in waiting}


def test_every_engine_says_whether_its_ranks_may_be_threads() -> None:
    said = {}
    for name in sorted(engines.builtin_names()):
        try:
            said[name] = engines.load(name).needs.no_threads
        except ImportError:
            continue
    assert {name for name, why in said.items() if not why} == THREADABLE
    assert {as_said(why).id for why in said.values() if why} <= {*catalogue()}
    assert engines.Needs().no_threads, "an engine of another package says so itself"
