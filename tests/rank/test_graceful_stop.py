"""How ranks agree on the last step: no rank may have passed it, and all must have acknowledged the request."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch.distributed import HashStore

from budget import budget
from samestep.rank import graceful_stop
from samestep.rank.graceful_stop import GracefulStop
from samestep.world import World


class Silent(GracefulStop):
    """A rank whose thread does not run: it acknowledges the request when the test calls acknowledge()."""

    def _poll(self, store: Any) -> None:
        pass

    def acknowledge(self) -> None:
        assert self._store
        self._store.add("acknowledged", 1)
        self._acknowledged = True


@pytest.fixture
def ranks() -> list[Silent]:
    store = HashStore()
    return [Silent(World(rank=rank, size=2, local_size=2, local_rank=rank), store) for rank in range(2)]


def test_rank_0_sets_no_step_before_all_have_acknowledged(ranks: list[Silent]) -> None:
    ranks[0].acknowledge()
    assert not ranks[0].ends_before(5)
    assert ranks[0].last is None
    ranks[1].acknowledge()
    assert not ranks[1].ends_before(6)  # a step ahead of rank 0, as it may be; it knows of no last step yet
    assert not ranks[0].ends_before(6)
    assert ranks[0].last is not None


def test_the_last_step_is_one_that_nobody_has_begun(ranks: list[Silent]) -> None:
    for rank in ranks:
        rank.acknowledge()
    assert not ranks[1].ends_before(11)  # rank 1 draws step 11 while rank 0 draws step 10, and its loader one more
    assert not ranks[1].ends_before(12)
    assert not ranks[0].ends_before(10)
    assert not ranks[1].ends_before(13)
    assert ranks[0].last == ranks[1].last
    last = ranks[0].last
    assert last is not None and last > 12
    assert [rank.ends_before(last) for rank in ranks] == [False, False]
    assert [rank.ends_before(last + 1) for rank in ranks] == [True, True]


def test_a_wish_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graceful_stop, "POLL_S", 0.01)
    store = HashStore()
    ranks = [GracefulStop(World(rank=rank, size=2, local_size=2, local_rank=rank), store) for rank in range(2)]
    ranks[1].request()
    until = time.monotonic() + budget(20)
    step = 0
    while not all(rank.ends_before(step) for rank in ranks):
        step += 1
        time.sleep(0.005)
        assert time.monotonic() < until
    assert ranks[0].last == ranks[1].last
