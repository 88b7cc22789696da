"""A few of the trials that results/ keeps a hundred of."""

from __future__ import annotations

from pathlib import Path

import pytest
import trials

from cluster import hosts, skip_where

pytestmark = pytest.mark.check


def test_whatever_is_killed_nothing_is_left(tmp_path: Path) -> None:
    skip_where(hosts.missing())
    results = trials.run((2, 3, 4), seed=1, out=tmp_path)
    assert all(trials.good(result) for result in results), [r for r in results if not trials.good(r)]
    assert sum(result["hit"] for result in results) >= 2
    assert any(result["victim"] == "link" and result["hit"] for result in results)
