"""The rendezvous of several machines: its store listens at one address, and nothing that is put into it is executed."""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from budget import budget
from said import refuses
from samestep.errors import UserError
from samestep.rank.membership import Member, member_of
from samestep.rank.process_group import _served_at
from samestep.rank.rendezvous import (
    DynamicRendezvous,
    JoinedMachines,
    OtherState,
    StateInJson,
    from_json,
    handler,
    store_at,
    to_json,
)
from samestep.records.files import as_json
from samestep.records.record import ATTEMPT
from samestep.world import World

HOST = "127.0.0.1"
NOW = datetime(2026, 1, 2, 3, 4, 5, 6, timezone.utc)
NODES = [_NodeDesc("10.0.0.1", 7, 0), _NodeDesc("h2.example", 8, 1), _NodeDesc("fd77::10", 9, 0)]
WAIT = timedelta(seconds=30)


class Opens:
    """A pickle that writes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def state() -> _RendezvousState:
    full = _RendezvousState()
    full.round, full.complete, full.deadline = 3, True, NOW
    full.participants = {NODES[1]: 0, NODES[0]: 1}
    full.wait_list, full.redundancy_list = {NODES[2]}, {NODES[0]}
    full.last_heartbeats = dict.fromkeys(NODES, NOW)
    return full


@pytest.mark.parametrize("given", [state(), _RendezvousState()], ids=["full", "new"])
def test_a_state_comes_back_as_it_was(given: _RendezvousState) -> None:
    text = to_json(pickle.dumps(given))
    back = pickle.loads(from_json(text))
    assert vars(back) == vars(given) and list(back.participants) == list(given.participants)
    assert to_json(from_json(text)) == text  # torch compares what it has written with what is there


def changed(**fields: object) -> bytes:
    return json.dumps(json.loads(to_json(pickle.dumps(state()))) | fields).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"garbage",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        pickle.dumps(state()),
        changed(round=-1),
        changed(round=2**70),
        changed(round=True),
        changed(round="1"),
        changed(deadline="2026-01-02T03:04:05"),
        changed(deadline=float("nan")),
        changed(wait_list=[["h\x1b[31m", 1, 2]]),
        changed(wait_list=[["h" * 300, 1, 2]]),
        changed(wait_list=[["h", 1, 2]] * 5000),
        changed(participants={"h": 1}),
        changed(last_heartbeats=[[["h", 1, 2], "2026-01-02T03:04:05"]]),
        changed(more=1),
        json.dumps({"round": 1}).encode(),
        b" " * (1 << 22),
    ],
    ids=range(20),
)
def test_what_samestep_has_not_written_is_refused_with_a_sentence(text: bytes) -> None:
    with refuses("rendezvous_state_from_elsewhere", OtherState):
        from_json(text)


@pytest.fixture
def store() -> TCPStore:
    return store_at(HOST, 0, WAIT, holds=True)


def test_a_pickle_in_the_store_is_not_loaded(store: TCPStore, tmp_path: Path) -> None:
    """Of another user, who writes it where torch keeps its state; torch's own backend hands it to pickle.loads."""
    canary = tmp_path / "executed"
    backend = StateInJson(store, "samestep")
    assert backend.get_state() is None
    written = backend.set_state(pickle.dumps(state()))
    assert written and written[2] and vars(pickle.loads(written[0])) == vars(state())
    stranger = TCPStore(HOST, store.port, None, False, WAIT, wait_for_workers=False)
    stranger.set("torch.rendezvous.samestep", base64.b64encode(pickle.dumps(Opens(canary))).decode())
    with pytest.raises(OtherState):
        backend.get_state()
    with pytest.raises(OtherState):
        backend.set_state(pickle.dumps(state()), written[1])
    assert not canary.exists()


@pytest.mark.parametrize("elastic", [False, True])
def test_two_machines_are_numbered(elastic: bool) -> None:
    """Through what torchrun calls, with the store that the ranks get; twice, as after a restart."""
    port = store_port()
    config = {"join_timeout": 60, "read_timeout": 60, "last_call_timeout": 60}
    config |= {"request": "f00d"} if elastic else {}

    def machine(number: int) -> DynamicRendezvous:
        own = {**config, "is_host": str(number == 0).lower()}
        parameters = RendezvousParameters("samestep", f"{HOST}:{port}", "samestep", 1 if elastic else 2, 2, HOST, **own)
        made = handler()(parameters)
        assert isinstance(made, DynamicRendezvous)
        return made

    with ThreadPoolExecutor(2) as pool:
        machines = [machine(0), machine(1)]
        for _ in range(2):
            joined = list(pool.map(lambda each: each.next_rendezvous(), machines))
            assert sorted(info.rank for info in joined) == [0, 1] and {info.world_size for info in joined} == {2}
            at = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in joined}
            assert len(at) == 1 and next(iter(at))[0] == HOST
        assert [each.num_nodes_waiting() for each in machines] == [0, 0]
        list(pool.map(lambda each: each.shutdown(), machines))
    os.environ.pop(ATTEMPT, None)  # which torchrun's process sets for its ranks


def store_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def test_a_text_of_the_store_is_printable_and_short(store: TCPStore) -> None:
    store.set("samestep/machines/machines", "2\x1b[31m\n" + "x" * 10_000)
    with pytest.raises(UserError) as refused:
        JoinedMachines(store, "h0:29500", "2").join(0)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[" * 100_000, b"{}", json.dumps(as_json(Member(1, "h", 0, "cpu"))).encode()]
)
def test_what_no_rank_has_written_is_refused(text: bytes) -> None:
    with pytest.raises(UserError):
        member_of(text, 0)
    told = json.dumps(as_json(Member(0, "h\x1b[31m", 0, "cpu"))).encode()
    assert member_of(told, 0).host.isprintable()


def test_the_ranks_store_listens_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by MASTER_ADDR; not where torchrun serves it, or another rank, or a name leads to this machine alone."""
    for name, value in {"MASTER_ADDR": HOST, "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "False"}.items():
        monkeypatch.setenv(name, value)
    here, first_of_two, second = World(size=2, local_size=2), World(size=2), World(rank=1, size=2, local_size=2)
    assert _served_at("env://", here) == (HOST, 1234)
    assert _served_at("tcp://[fd77::10]:29500", first_of_two) == ("fd77::10", 29500)
    assert _served_at("env://", second) is _served_at("env://", first_of_two) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert _served_at("env://", here) is None
    held = store_at(HOST, 0, timedelta(seconds=budget()), holds=True)
    with socket.socket() as other:
        other.settimeout(1)
        assert other.connect_ex(("127.0.0.2", held.port)) != 0  # nobody listens at another address of this machine
