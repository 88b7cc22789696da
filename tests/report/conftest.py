"""Results for every test of the report."""

from __future__ import annotations

import pytest
from example_results import compared, proof_of

from samestep.records.results import CompareResults


@pytest.fixture
def results() -> CompareResults:
    """What a comparison gives."""
    return compared()


@pytest.fixture
def proof(results: CompareResults) -> CompareResults:
    """What verify alone gives: the same without any measurement."""
    return proof_of(results)
