"""The process that forks the ranks of all the runs of pytest that these tests start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fork_servers


@pytest.fixture(scope="session", autouse=True)
def _server(_fork_servers: None) -> Iterator[None]:
    with fork_servers.of_pytest_runs():
        yield
