"""Real hosts and a real Slurm on one machine, for tests: network namespaces, slurmctld, slurmd, munge."""

from __future__ import annotations

import os

import pytest


def skip_where(missing: str | None) -> None:
    """Skips a test where hosts or Slurm are missing, for the reason that their `missing()` gives; in CI it fails."""
    if missing:
        assert "CI" not in os.environ, missing
        pytest.skip(missing)
