"""What is attached to torch in a test, and detached after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samestep.rank.hooks import Hooks


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    attached = Hooks()
    yield attached
    attached.detach()
