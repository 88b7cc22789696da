"""Results for every test of the report."""

from __future__ import annotations

import pytest
from example_results import compared, proof_of

from samestep.records.results import StudyResults


@pytest.fixture
def results() -> StudyResults:
    """What a comparison gives."""
    return compared()


@pytest.fixture
def proof(results: StudyResults) -> StudyResults:
    """What verify alone gives: the same without any measurement."""
    return proof_of(results)
