"""The mark of the tests that are left out of the quick lane."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "check: takes too long for the quick lane")
