"""Records the states of random generators, so that equal streams on several ranks can be detected."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from typing import Any

import torch

from samestep.records.beside_steps import RandomSeen


class Randoms:
    """Records the generators of one rank, around its training forwards."""

    def __init__(self) -> None:
        self.seen = RandomSeen(states={}, draws=[], workers=[])

    def before(self, step: int) -> str:
        """Is called before each training forward. Returns the digest of torch's state where `step` has none yet."""
        if len(self.seen.draws) > step:
            return ""
        state = torch_state()
        if not self.seen.states:
            self.seen = RandomSeen({"torch": state, **_other_states()}, self.seen.draws, self.seen.workers)
        return state

    def after(self, step: int, before: str) -> None:
        """Is called after each training forward, with what before() has returned."""
        if before:
            self.seen.draws.extend([""] * (step - len(self.seen.draws)))
            self.seen.draws.append(before if torch_state() != before else "")

    def begin_pass(self, iterator: Any) -> None:
        """Notes the seed of a loader's workers."""
        if getattr(iterator, "_num_workers", 0):
            self.seen.workers.append(int(iterator._base_seed))


def torch_state() -> str:
    """Returns a digest of torch's generators: the CPU's, and the current GPU's where it is in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return _digest(b"".join(state.numpy().tobytes() for state in states))


def _other_states() -> dict[str, str]:
    states = {"python": _digest(repr(random.getstate()).encode())}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = _digest(pickle.dumps(numpy.random.get_state()))
    return states


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
