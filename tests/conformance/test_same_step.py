"""Engines take the reference's step for every behaviour that a job can have, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranks import Ranks, prove

DRAWN = f"{Path(__file__).parent}/jobs_drawn.py:job"

CASES = {
    "even": {"rows": "32", "global_batch": "8"},
    "uneven last batch": {"rows": "29", "global_batch": "8"},
    "dataset smaller than the global batch": {"rows": "5", "global_batch": "8"},
    "global batch not divisible by the ranks": {"rows": "30", "global_batch": "7"},
    "more ranks than rows": {"rows": "9", "global_batch": "1"},
    "a last batch of fewer rows than ranks": {"rows": "17", "global_batch": "16"},
    "last batch dropped": {"rows": "29", "global_batch": "8", "last": "drop"},
    "accumulation": {"rows": "32", "global_batch": "8", "micro_batch": "2"},
    "accumulation with an empty micro-batch": {"rows": "10", "global_batch": "9", "micro_batch": "1"},
    "clipping": {"clip_norm": "0.1"},
    "scheduler by step": {"every": "step"},
    "scheduler by epoch": {"every": "epoch"},
    "not shuffled": {"shuffle": "false"},
    "a stream": {"stream": "true", "rows": "29"},
    "a stream, accumulation": {"stream": "true", "micro_batch": "2"},
    "weighted rows": {"weighted": "true", "rows": "29"},
    "frozen parameter": {"frozen": "true"},
    "dropout": {"arch": "deep"},
    "BatchNorm": {"arch": "batchnorm", "rows": "29"},
    "AdamW": {"optimizer": "adamw"},
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ddp_takes_the_same_step(case: str, size: int, ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(size), DRAWN, "ddp", CASES[case])
    assert verdict.verdict == "same", verdict
    assert verdict.max_difference is not None  # it compared something
    assert verdict.bitwise or size == 3  # sums of three depend on their order


@pytest.mark.parametrize("case", CASES)
def test_single_takes_the_same_step(case: str, ranks: Callable[[int], Ranks], reference_rank: Ranks) -> None:
    verdict = prove(reference_rank, ranks(1), DRAWN, "single", CASES[case])
    assert verdict.verdict == "same", verdict
    assert verdict.bitwise


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


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=st.fixed_dictionaries(DRAWS), size=st.sampled_from([1, 2, 3]))
def test_no_false_alarm(
    drawn: dict[str, object], size: int, ranks: Callable[[int], Ranks], reference_rank: Ranks
) -> None:
    chosen = {key: str(value) for key, value in drawn.items()}
    chosen["shuffle"] = str(drawn["shuffle"] and not drawn["stream"])
    verdict = prove(reference_rank, ranks(size), DRAWN, "ddp", chosen)
    assert verdict.verdict == "same", (chosen, size, verdict)
