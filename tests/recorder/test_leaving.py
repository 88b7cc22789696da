"""Why a rank leaves by itself: the line of its sys.exit, and the exception of a load that its script has caught."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from said import says
from samestep.rank.hooks import Hooks
from samestep.recorder.leaving import Leaving

STEPS = [0]


@pytest.fixture
def leaving() -> Iterator[Leaving]:
    hooks, leaving = Hooks(), Leaving(lambda: STEPS[0])
    leaving.patch_loads(hooks)
    leaving.patch_exits(hooks, lambda: None)
    STEPS[0] = 3
    yield leaving
    hooks.detach()


LOAD = next(line for line, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# at: load"))


def load() -> object:
    try:
        return torch.load("absent.pt")  # at: load
    except OSError:
        return None


def test_an_exception_that_was_caught_is_the_reason_until_the_next_step(leaving: Leaving) -> None:
    assert leaving.reason is None
    load()
    says(leaving.reason, "rank_caught_exception")
    caught = leaving.reason.fields["caught"]
    says(caught, "exception_at_line", kind="FileNotFoundError", line=f"test_leaving.py:{LOAD}, load")
    assert [site.line for call in leaving.calls() for site in call.sites] == [LOAD]
    STEPS[0] += 1
    assert leaving.reason is None and leaving.calls() == []


def leave_after_an_exception() -> None:
    try:
        raise KeyError("a row")
    except KeyError:
        sys.exit(2)


def test_the_line_of_an_exit_is_told_with_the_exception_that_it_answers(leaving: Leaving) -> None:
    with pytest.raises(SystemExit):
        leave_after_an_exception()
    says(leaving.reason, "rank_called_exit", code="2")
    says(leaving.reason.fields["caught"], "exception_at_line", kind="KeyError")
    with pytest.raises(SystemExit):
        sys.exit()
    says(leaving.reason, "rank_called_exit", code="", caught=None)


def test_a_loader_that_is_read_to_its_end_has_raised_nothing(leaving: Leaving) -> None:
    list(torch.utils.data.DataLoader([1, 2]))
    assert leaving.reason is None


class Broken:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise ValueError("a broken row")


def test_an_exception_of_a_loader_that_was_caught_is_the_reason(leaving: Leaving) -> None:
    with pytest.raises(ValueError, match="a broken row"):
        next(iter(torch.utils.data.DataLoader(Broken())))
    says(leaving.reason.fields["caught"], "exception_at_line", kind="ValueError", text="a broken row")
