"""A training that is carried from one layout of the weights to another is the one that was not interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from lane_marks import CHECK, FULL
from resume.layouts import FAULTS, LINKS, LayoutFault, chain, planted, uninterrupted


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uninterrupted(tmp_path_factory.mktemp("layouts"))


@pytest.mark.check
def test_a_training_carried_through_layouts_is_that_of_one_process(whole: Path, tmp_path: Path) -> None:
    """In float64, to 1e-12: weights, averages, the optimizer's state, rates and scheduler, after each link."""
    links = chain(tmp_path, whole)
    assert [link.name for link in links] == [*LINKS], links[-1].failed
    for link in links:
        assert link.is_same, (link.name, link.differences)
    for link in links[1:]:
        # What no link changes cannot show that it was carried.
        assert all(change > 0 for change in link.trained.values()), (link.name, link.trained)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=FULL if number else CHECK, id=fault.name) for number, fault in enumerate(FAULTS)],
)
def test_a_fault_of_another_layout_is_caught(fault: LayoutFault, whole: Path) -> None:
    *before, last = planted(fault, whole)
    assert all(link.is_same for link in before)
    assert last.name == fault.link
    assert fault.part in last.differing, (last.failed, last.differences)
