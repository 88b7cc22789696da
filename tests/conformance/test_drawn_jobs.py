"""Jobs that are drawn at random: no healthy one is told to differ, and some are the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranks import Ranks, prove

DRAWN = f"{Path(__file__).parent}/jobs_drawn.py:job"


@pytest.mark.parametrize("job", ["conv", "tied", "transformer", "sentences"])
def test_ddp_is_bitwise_at_two_ranks(job: str, ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(2), f"jobs:{job}", "ddp")
    assert (verdict.verdict, verdict.bitwise) == ("same", True)


def test_loader_processes_change_nothing(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(2), "jobs:sentences", "ddp", {"workers": "1"})
    assert (verdict.verdict, verdict.bitwise) == ("same", True)


def test_a_stream_is_read_by_one_worker(ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(2), DRAWN, "ddp", {"stream": "true", "workers": "3", "rows": "29"})
    assert (verdict.verdict, verdict.bitwise) == ("same", True)


DRAWS = {
    "arch": st.sampled_from(["mlp", "deep", "conv", "batchnorm"]),
    "width": st.integers(1, 9),
    "rows": st.integers(2, 60),
    "global_batch": st.integers(1, 17),
    "seed": st.integers(0, 10**6),
    "optimizer": st.sampled_from(["sgd", "momentum", "adamw", "adam", "rmsprop"]),
    "micro_batch": st.integers(0, 4),
    "clip_norm": st.sampled_from([0.0, 0.01, 1.0]),
    "every": st.sampled_from(["step", "epoch", "never"]),
    "weighted": st.booleans(),
    "shuffle": st.booleans(),
    "stream": st.booleans(),
}


@pytest.mark.check
@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=st.fixed_dictionaries(DRAWS), size=st.sampled_from([1, 2, 3]))
def test_no_false_alarm(
    drawn: dict[str, object], size: int, ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    chosen = {key: str(value) for key, value in drawn.items()}
    chosen["shuffle"] = str(drawn["shuffle"] and not drawn["stream"])
    verdict = prove(reference_rank, ranks(size), DRAWN, "ddp", chosen, complete=True)
    assert verdict.verdict == "same", (chosen, size, verdict)
