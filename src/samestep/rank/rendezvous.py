"""torchrun's rendezvous of machines, which refuses at once a machine that does not belong to it.

With --node-rank it is torch's static one. Without, it is torch's dynamic one, which numbers the machines, and with
--nnodes MIN:MAX lets them leave and join; torch keeps its state pickled in the store, where anybody could put a pickle
of his own, so here it is JSON. The store listens on the master's address only: torch's
TCPStore listens on every interface, and this handler gives it a socket that is bound to one. Port 0 in the endpoint
means any free port. torchrun finds the handler by its entry point in the group `torchrun.handlers`.
Source: https://docs.pytorch.org/docs/stable/elastic/rendezvous.html
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Annotated

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
    create_handler,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from samestep.errors import UserError, message_in, printable, sent_line
from samestep.message import message
from samestep.rank.membership import count_reader
from samestep.records.record import ATTEMPT
from samestep.world import RENDEZVOUS_PORT
from samestep.world.network import bound

MOST_MACHINES = 4096
LONGEST_STATE = 1 << 21  # bytes
FIELDS = {
    *("round", "complete", "deadline", "closed"),
    *("participants", "wait_list", "redundancy_list", "last_heartbeats"),
}
Number = Annotated[int, Field(ge=0, lt=2**31)]
Host = Annotated[str, Field(max_length=255, pattern=r"^[\w.:%-]*$")]
Machine = tuple[Host, Number, Number]  # the machine's address, process and number in that process
STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, config=STRICT)
class State:
    """What torch's _RendezvousState holds, in types that JSON has. Pairs stand in the order of torch's dictionaries."""

    round: Number
    complete: bool
    deadline: AwareDatetime | None
    closed: bool
    participants: Annotated[tuple[tuple[Machine, Number], ...], Field(max_length=MOST_MACHINES)]
    wait_list: Annotated[tuple[Machine, ...], Field(max_length=MOST_MACHINES)]
    redundancy_list: Annotated[tuple[Machine, ...], Field(max_length=MOST_MACHINES)]
    last_heartbeats: Annotated[tuple[tuple[Machine, AwareDatetime], ...], Field(max_length=MOST_MACHINES)]


_states = TypeAdapter(State)


class OtherState(RendezvousStateError, UserError):
    """The state in the store is not one that samestep has written."""


def _plain(node: _NodeDesc) -> Machine:
    return node.addr, node.pid, node.local_id


def to_json(pickled: bytes) -> bytes:
    """Returns a state that torch has just pickled, in this process, as JSON."""
    state = pickle.loads(pickled)
    if vars(state).keys() != FIELDS:
        raise UserError(message("torch_keeps_an_unknown_rendezvous_state"))
    return _states.dump_json(
        State(
            round=state.round,
            complete=state.complete,
            deadline=state.deadline,
            closed=state.closed,
            participants=tuple((_plain(node), rank) for node, rank in state.participants.items()),
            wait_list=tuple(sorted(map(_plain, state.wait_list))),
            redundancy_list=tuple(sorted(map(_plain, state.redundancy_list))),
            last_heartbeats=tuple((_plain(node), time) for node, time in state.last_heartbeats.items()),
        )
    )


def from_json(text: bytes) -> bytes:
    """Returns the state that JSON of the store holds as a pickle for torch. Raises OtherState for anything else."""
    try:
        if len(text) > LONGEST_STATE:
            raise ValueError
        read = _states.validate_json(text)
    except (ValidationError, ValueError, RecursionError):
        raise OtherState(message("rendezvous_state_from_elsewhere")) from None
    state = _RendezvousState()
    state.round, state.complete, state.deadline, state.closed = read.round, read.complete, read.deadline, read.closed
    state.participants = {_NodeDesc(*machine): rank for machine, rank in read.participants}
    state.wait_list = {_NodeDesc(*machine) for machine in read.wait_list}
    state.redundancy_list = {_NodeDesc(*machine) for machine in read.redundancy_list}
    state.last_heartbeats = {_NodeDesc(*machine): time for machine, time in read.last_heartbeats}
    return pickle.dumps(state)


class StateInJson(RendezvousBackend):
    """torch's c10d backend of a store, whose state is JSON there."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._inner = C10dRendezvousBackend(store, run_id)

    @property
    def name(self) -> str:
        return "samestep"

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._inner.get_state()
        return (from_json(found[0]), found[1]) if found else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._inner.set_state(to_json(state), token)
        return (from_json(found[0]), *found[1:]) if found else None


POLL_S = 0.1
READ_S = 5.0  # how long the machine that holds the store waits for those that read why it ends
LONGEST_TEXT = 500  # characters of what another program has written into the store
JOIN_S = 600  # how long a machine waits for the master, as torch's own handler does


class JoinedMachines:
    """The machines that have joined a rendezvous, as they note it in its store.

    endpoint: the address, for the errors. machines: what --nnodes asks for.
    """

    def __init__(self, store: Store, endpoint: str, machines: str) -> None:
        self._store, self._endpoint, self._machines = PrefixStore("samestep/machines", store), endpoint, machines

    def join(self, number: int | None, digest: str = "") -> None:
        """Adds this machine. number: its --node-rank; None: the rendezvous will number it.

        digest: of what it is to train, where machines may join later. Raises UserError where another machine has
        this number, or where the machines of another training have joined.
        """
        first = _text(self._store.compare_set("machines", "", self._machines))
        if first != self._machines:
            machines = {"machines": self._machines, "machines_of_first": first, "address": self._endpoint}
            raise UserError(message("machines_ask_for_different_numbers_of_machines", **machines))
        if digest:
            if _text(self._store.compare_set("request", "", digest)) != digest:
                raise UserError(message("command_differs_from_machines_that_train", address=self._endpoint))
        elif number is None and self._store.check(["complete"]):
            raise UserError(message("machines_of_another_training_joined", machines=first, address=self._endpoint))
        if number is not None:
            me = f"{socket.gethostname()}, process {os.getpid()}"
            holder = _text(self._store.compare_set(f"machine {number}", "", me))
            if holder != me:
                taken = {"address": self._endpoint, "node_rank": number, "holder": holder}
                self._store.set("refused", sent_line(message("two_machines_with_one_node_rank", other=me, **taken)))
                raise UserError(message("node_rank_taken", **taken))

    def await_all(self, timeout: timedelta, holds_store: bool = False) -> None:
        """Waits until each number has joined. holds_store: the store ends with this process.

        Raises UserError where two machines have joined with one number, and TimeoutError where one is missing.
        """
        until = time.monotonic() + timeout.total_seconds()
        numbers = range(int(self._machines))
        while missing := [number for number in numbers if not self._store.check([f"machine {number}"])]:
            if self._store.check(["refused"]):
                why = _text(self._store.get("refused"))
                joined = len(numbers) - len(missing)
                count_reader(self._store, "read", joined, holds_store=holds_store, wait_s=READ_S)
                raise UserError(message_in(why) or why)
            if time.monotonic() > until:
                raise TimeoutError(f"no machine has joined with --node-rank {missing[0]}")
            time.sleep(POLL_S)

    def round(self, info: RendezvousInfo) -> int:
        """Returns how often the machines have joined before, the same number on each."""
        if info.rank == 0:
            info.store.set("samestep/round", str(self._store.add("rounds", 1) - 1))
        number = _text(info.store.get("samestep/round"))
        if not number.isdecimal() or len(number) > 9:
            raise UserError(message("another_program_writes_into_the_rendezvous", address=self._endpoint))
        return int(number)

    def set_complete(self, complete: bool) -> None:
        """Notes whether all machines have joined. After a restart they join again."""
        if complete:
            self._store.set("complete", "")
        else:
            self._store.delete_key("complete")


def _text(value: bytes) -> str:
    """Returns a text of the store, which any program that reaches its port can write."""
    return printable(value.decode(errors="replace"), LONGEST_TEXT)


def store_at(host: str, port: int, timeout: timedelta, *, holds: bool) -> TCPStore:
    """Opens the store at an address. holds: this process serves it, at this address alone; port 0: any free one."""
    if not holds:
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    listening = bound(host, port)
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        None,
        True,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


class StaticRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, except that the store listens on one address."""

    def get_backend(self) -> str:
        return "samestep"

    def next_rendezvous(self) -> RendezvousInfo:
        if not self._store:
            store = store_at(self.master_addr, self.master_port, self.timeout, holds=self.rank == 0)
            self._store, self.master_port = store, store.port
            machines = JoinedMachines(self._store, f"{self.master_addr}:{self.master_port}", str(self.world_size))
            machines.join(self.rank)
            machines.await_all(self.timeout, holds_store=self.rank == 0)
        store_info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, self._store), self.rank, self.world_size, store_info)


class DynamicRendezvous(RendezvousHandler):
    """torch's dynamic rendezvous, which numbers the machines; a machine of another training is refused.

    Where machines may leave and join, the ranks get the number of their rendezvous: torch's own count of restarts is
    another one on each machine.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        host, port = parse_rendezvous_endpoint(params.endpoint, RENDEZVOUS_PORT)
        timeout = timedelta(seconds=params.get_as_int("read_timeout", JOIN_S) or JOIN_S)
        store = store_at(host, port, timeout, holds=bool(params.get_as_bool("is_host", False)))
        machines = f"{params.min_nodes}:{params.max_nodes}"
        self._digest = str(params.config.get("request", ""))
        self._machines = JoinedMachines(store, params.endpoint, machines if self._digest else str(params.max_nodes))
        self._machines.join(None, self._digest)
        self._inner = create_handler(store, StateInJson(store, params.run_id), params)
        if address := params.local_addr:  # torch's own store for the ranks would listen on every interface
            open_store = lambda _, port: store_at(address, port, timeout, holds=True)  # noqa: E731
            self._inner._create_tcp_store_server = open_store  # type: ignore[method-assign]
        self._joined = False

    def get_backend(self) -> str:
        return "samestep"

    @property
    def use_agent_store(self) -> bool:
        return self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        if self._joined and not self._digest:
            self._machines.set_complete(False)
        info = self._inner.next_rendezvous()
        if self._digest:
            os.environ[ATTEMPT] = str(self._machines.round(info))  # the ranks inherit it
        else:
            self._machines.set_complete(True)
        self._joined = True
        return info

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the function that torchrun calls with its parameters to create the handler: its entry point."""

    def create(params: RendezvousParameters) -> RendezvousHandler:
        if "rank" not in params.config:
            return DynamicRendezvous(params)
        host, port = parse_rendezvous_endpoint(params.endpoint, 0)
        rank, timeout_s = int(params.config["rank"]), int(params.config.get("timeout", JOIN_S))
        return StaticRendezvous(host, port, rank, params.max_nodes, params.run_id, timeout_s)

    return create


CONNECT_S = 10.0


def main(host: str, port: int, machines: str) -> int:
    store = TCPStore(host, port, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False)
    with suppress(UserError):  # the other machine has joined, and reads now that this one has joined, too
        # Without an error the other machine is refused when it joins.
        JoinedMachines(store, f"{host}:{port}", machines).join(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
