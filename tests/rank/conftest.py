from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from samestep.rank import group


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A gloo group of one rank can be opened, and is closed where an error leaves it open."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    yield
    if dist.is_initialized():
        group._open_store.clear()
        dist.destroy_process_group()
