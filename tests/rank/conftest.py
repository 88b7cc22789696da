from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch.distributed as dist

from samestep.rank import process_group


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo group of one rank can be opened, and is closed where an error leaves it open."""
    # Lightning and Accelerate leave RANK and others in the environment of the process that trains.
    with patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}):
        yield
    if dist.is_initialized():
        process_group._open_store.clear()
        dist.destroy_process_group()
