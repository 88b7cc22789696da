"""Ranks that are kept between tests, and the folder of jobs on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(n): n ranks, started once for all tests."""
    with ExitStack() as stack:
        kept: dict[int, Ranks] = {}

        def of(size: int) -> Ranks:
            if size not in kept:
                kept[size] = stack.enter_context(Ranks(size))
            return kept[size]

        yield of


@pytest.fixture(scope="session")
def judge_rank() -> Iterator[Ranks]:
    """The process that plays the reference."""
    with Ranks(1) as rank:
        yield rank
