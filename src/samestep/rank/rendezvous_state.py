"""The state of torch's dynamic rendezvous in the store, as JSON instead of a pickle.

torch gives a backend its state as a pickle, and unpickles what the backend returns. The store takes values from every
program that reaches its port, so this backend writes JSON there, checks what it reads, and makes the pickle that it
returns to torch itself.
"""

from __future__ import annotations

import pickle
from typing import Annotated

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)

from samestep.errors import UserError

MOST_MACHINES = 4096
LONGEST_STATE = 1 << 21  # bytes
FIELDS = {
    *("round", "complete", "deadline", "closed"),
    *("participants", "wait_list", "redundancy_list", "last_heartbeats"),
}
Number = Annotated[int, Field(ge=0, lt=2**31)]
Host = Annotated[str, Field(max_length=255, pattern=r"^[\w.:%-]*$")]
Machine = tuple[Host, Number, Number]  # its address, process and number in that process
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
        raise UserError("this torch keeps another state of its rendezvous than samestep knows; give --node-rank")
    return _states.dump_json(
        State(
            state.round,
            state.complete,
            state.deadline,
            state.closed,
            tuple((_plain(node), rank) for node, rank in state.participants.items()),
            tuple(sorted(map(_plain, state.wait_list))),
            tuple(sorted(map(_plain, state.redundancy_list))),
            tuple((_plain(node), time) for node, time in state.last_heartbeats.items()),
        )
    )


def from_json(text: bytes) -> bytes:
    """Returns the state that JSON of the store holds as a pickle for torch. Raises OtherState for anything else."""
    try:
        if len(text) > LONGEST_STATE:
            raise ValueError
        read = _states.validate_json(text)
    except (ValidationError, ValueError, RecursionError):
        raise OtherState(
            "another program has written into the rendezvous; choose another --port, or see who reaches this one"
        ) from None
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
