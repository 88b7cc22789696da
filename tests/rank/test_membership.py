"""What ranks and machines compare when they meet: each fault is a sentence for every one of them, at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store, TCPStore

from said import refuses, says
from samestep.errors import LostPeer, Refused
from samestep.launch import rendezvous_address
from samestep.message import Message
from samestep.rank.membership import Membership
from samestep.rank.process_group import _naming_the_lost
from samestep.rank.rendezvous import JoinedMachines
from samestep.records.launch_request import LaunchRequest
from samestep.world import World
from samestep.world.heartbeat import ENDING, FORWARD, Heartbeat, read

ASKED = LaunchRequest("my_job.py:job", "f00d", "lr=0.1", "ddp", "", "best", "0.1.0 beef", "2.13.0")
PLACES = [World(0, 2, 0, 2), World(1, 2, 1, 2)]


def met(worlds: list[World], asked: list[LaunchRequest | None]) -> list[Message | None]:
    """What each rank is refused with, when they meet."""
    store = HashStore()

    def meet(rank: int) -> Message | None:
        try:
            Membership(store, worlds[rank], asked[rank]).read()
        except Refused as error:
            return error.message
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(meet, range(2)))


def test_equal_ones_meet() -> None:
    assert met(PLACES, [ASKED, ASKED]) == [None, None]
    assert met(PLACES, [None, None]) == [None, None]


@pytest.mark.parametrize("name", [field.name for field in fields(LaunchRequest)])
def test_each_difference_is_named_to_both(name: str) -> None:
    other = replace(ASKED, **{name: "lr=0.2"})
    refused = met(PLACES, [ASKED, other])
    assert refused[0] and refused[0] == refused[1]
    values = {"value": "lr=0.2", "value_on_rank_0": getattr(ASKED, name) or "none"}
    says(refused[0], "commands_of_ranks_differ", rank=1, **values)


def test_a_gpu_and_a_cpu() -> None:
    refused = met([PLACES[0], replace(PLACES[1], devices=("cuda:0",))], [ASKED, ASKED])
    for said in refused:
        says(said, "commands_of_ranks_differ", what="the device", value="cuda", value_on_rank_0="cpu")


def test_two_ranks_with_one_local_rank() -> None:
    refused = met([PLACES[0], replace(PLACES[1], local_rank=0)], [ASKED, ASKED])
    for said in refused:
        says(said, "two_ranks_with_one_local_rank", ranks=[0, 1], local_rank=0)


class _EndsWithRank0:
    """A store that answers nothing once all ranks have read, as when rank 0 has ended."""

    def __init__(self, read: int) -> None:
        self.store, self.read = HashStore(), read

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def add(self, key: str, amount: int) -> int:
        assert self.read < len(PLACES), "the store has ended"
        self.read += amount
        return self.read


def test_no_rank_asks_a_store_that_may_have_ended() -> None:
    store = _EndsWithRank0(read=1)
    ranks = [Membership(store, replace(world, local_rank=0)) for world in PLACES]  # type: ignore[arg-type]
    with refuses("two_ranks_with_one_local_rank", Refused, local_rank=0):
        ranks[1].read()


def rendezvous(store: Store, machines: int = 2) -> JoinedMachines:
    return JoinedMachines(store, "h0:29500", str(machines))


def test_two_machines_with_one_number() -> None:
    store = HashStore()
    store.set("samestep/machines/machine 1", "h1, process 7")
    rendezvous(store).join(0)
    with refuses("node_rank_taken", address="h0:29500", node_rank=1, holder="h1, process 7"):
        rendezvous(store).join(1)


def test_those_that_wait_are_told_of_two_machines_with_one_number() -> None:
    store = HashStore()
    store.set("samestep/machines/machine 1", "h1, process 7")
    first = JoinedMachines(store, "h0:29500", "3")
    first.join(0)
    with pytest.raises(TimeoutError, match="--node-rank 2"):
        first.await_all(timedelta(seconds=0))
    with refuses("node_rank_taken", node_rank=1):
        JoinedMachines(store, "h0:29500", "3").join(1)
    with refuses("two_machines_with_one_node_rank", address="h0:29500", node_rank=1, holder="h1, process 7"):
        first.await_all(timedelta(seconds=60))
    store.set("samestep/machines/machine 2", "h2, process 8")
    first.await_all(timedelta(seconds=0))  # nobody waits any more, and nobody is told


def test_a_master_is_told_of_a_second_one() -> None:
    """By the command of the second one, which may be typed before the master listens."""
    port = rendezvous_address.free_port("127.0.0.1")
    assert not rendezvous_address.report_second_master("127.0.0.1", port, 2, timeout_s=0.1)
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    master = JoinedMachines(store, "h0:29500", "2")
    master.join(0)
    assert rendezvous_address.report_second_master("127.0.0.1", port, 2, timeout_s=0.1)
    with refuses("two_machines_with_one_node_rank", node_rank=0):
        master.await_all(timedelta(seconds=0))


def test_a_machine_joins_the_training_that_it_was_asked_for() -> None:
    store = HashStore()
    for _ in range(2):  # one that has left may come again
        JoinedMachines(store, "h0:29500", "1:3").join(None, "a digest")
    with refuses("command_differs_from_machines_that_train", address="h0:29500"):
        JoinedMachines(store, "h0:29500", "1:3").join(None, "another")
    with refuses("machines_ask_for_different_numbers_of_machines", machines="1:2", machines_of_first="1:3"):
        JoinedMachines(store, "h0:29500", "1:2").join(None, "a digest")


def test_another_number_of_machines() -> None:
    store = HashStore()
    rendezvous(store).join(None)
    with refuses("machines_ask_for_different_numbers_of_machines", machines="3", machines_of_first="2"):
        rendezvous(store, 3).join(None)


def test_a_machine_of_another_training_is_told_and_one_after_a_restart_is_not() -> None:
    store = HashStore()
    first = rendezvous(store)
    first.join(None)
    rendezvous(store).join(None)
    first.set_complete(True)
    with refuses("machines_of_another_training_joined", machines="2", address="h0:29500"):
        rendezvous(store).join(None)
    first.set_complete(False)
    rendezvous(store).join(None)


def test_a_rank_that_asks_who_is_lost_is_not_taken_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes seconds, and --stall may be shorter: the phase is another, with a limit of its own."""
    own, seen = Heartbeat(), list[int]()
    own.open(tmp_path / "heartbeat")
    own.begin(FORWARD)
    monkeypatch.setattr("samestep.rank.process_group.heartbeat", own)
    members = Membership(HashStore(), PLACES[0])

    def note(seconds: float, do: object) -> None:
        pulse = read(tmp_path / "heartbeat")
        seen.append(pulse.activity if pulse else -1)

    monkeypatch.setattr("samestep.rank.membership.within", note)
    with pytest.raises(LostPeer), _naming_the_lost(members, PLACES[0]):
        raise RuntimeError("[x/gloo/tcp.cc:1] gloo: Connection closed by peer [10.0.0.1]:1")
    assert seen == [ENDING]


@pytest.mark.parametrize(("local_size", "told"), [(2, True), (1, False)])
def test_a_rank_of_one_machine_that_is_lost_has_ended_quietly(
    local_size: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network lies between, and a launcher reports every end but that with exit code 0."""
    monkeypatch.setattr("samestep.rank.membership.ANSWER_S", 0)
    lost = Membership(HashStore(), replace(PLACES[0], local_size=local_size)).lost(RuntimeError("closed by peer"))
    says(lost.message, "ranks_lost_as_by_exit" if told else "ranks_lost", ranks=[1], error="closed by peer")
