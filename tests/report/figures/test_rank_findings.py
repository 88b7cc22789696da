"""What is said of ranks that are slow, wait for data or grow; and of those that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.records.monitor import RankUse
from samestep.report.figures.rank_findings import extra_contexts, findings, unexplained

HEALTHY = RankUse(
    rank=0,
    steps=100,
    seconds=20.0,
    loading_s=0.1,
    compute_s=15.0,
    queue_s=0.2,
    late_share=0.02,
    fetches=100,
    fetch_s=2.0,
    fetch_cpu_s=2.0,
    workers=2,
    prefetch=2,
    first_memory=1 << 30,
    memory=1 << 30,
    workers_first_memory=1 << 28,
    workers_memory=1 << 28,
    worker_first_resident=1 << 28,
    worker_resident=1 << 28,
    worker_processes=2,
)
LATE = {"rank": 1, "late_share": 0.5}


def said(first: RankUse, second: RankUse, cores: float = 16) -> list[tuple[str, str]]:
    found = findings([first, second], cores)
    return [(each.id, getattr(each.fields.get("why", each.fields.get("advice")), "id", "")) for each in found]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({**LATE, "steps": 5}, []),  # too few to judge by
        ({**LATE, "loading_s": 10.0}, [("rank_is_slow", "slow_by_loading")]),
        ({**LATE, "compute_s": 25.0}, [("rank_is_slow", "slow_by_computing")]),
        ({**LATE, "queue_s": 10.0}, [("rank_is_slow", "slow_by_waiting_for_a_processor")]),
        (LATE, [("rank_is_slow", "slow_outside_of_loading_and_computing")]),
        ({**LATE, "compute_s": 20.1, "queue_s": 5.6}, [("rank_is_slow", "slow_by_one_of_several")]),
        ({**LATE, "compute_s": 32.0, "queue_s": 60.0}, [("rank_is_slow", "slow_by_one_of_several")]),
        ({**LATE, "compute_s": 23.0, "queue_s": 2.0}, [("rank_is_slow", "slow_by_computing")]),
        ({"memory": 2 << 30}, [("memory_of_rank_grows", "")]),
        ({"workers_memory": 1 << 30, "worker_resident": 5 << 27}, [("memory_of_workers_grows", "")]),
        ({"workers_memory": 1 << 30}, [("workers_copy_the_dataset", "")]),
        # As one for training and one for evaluation.
        ({"workers_memory": 1 << 30, "worker_processes": 4}, [("workers_copy_the_dataset", "")]),
        ({"workers_memory": 5 << 28, "memory": 3 << 29}, [("workers_copy_the_dataset", "")]),
        # More loader workers than before share the same pages; none are left after an epoch.
        ({"workers_memory": 1 << 30, "memory": 1 << 28}, []),
        ({"workers_memory": 0, "memory": 5 << 28, "first_memory": 1 << 28, "workers_first_memory": 1 << 30}, []),
    ],
)
def test_one_rank_is_judged_by_the_others(changes: dict[str, float], says: list[tuple[str, str]]) -> None:
    assert said(HEALTHY, replace(HEALTHY, **{"rank": 1} | changes)) == says


def test_a_rank_that_sleeps_is_looked_at() -> None:
    late = replace(HEALTHY, **LATE)
    assert unexplained([HEALTHY, late]) == 1
    assert unexplained([HEALTHY, replace(late, loading_s=10.0)]) is None
    assert unexplained([HEALTHY]) is None
    # Not the line at which a rank that is not late is as often, as where all wait or sleep.
    cases = [(4, 0, True), (3, 0, False), (9, 1, True), (9, 4, False), (9, 9, False), (2, 9, False)]
    for looks_at_line, others_at_line, is_told in cases:
        line = "train.py:7, hook"
        seen = replace(late, line=line, looks=9, looks_at_line=looks_at_line, others_at_line=others_at_line)
        (found,) = findings([HEALTHY, seen], 16)
        assert found.fields["why"].fields["line"] == (line if is_told else None)


def test_all_ranks_wait_for_their_loaders_or_for_each_other() -> None:
    loads = replace(HEALTHY, loading_s=12.0, compute_s=7.0, fetch_s=40.0, fetch_cpu_s=40.0)
    assert said(loads, replace(loads, rank=1)) == [("training_waits_for_its_loader", "workers_would_keep_up")]
    starts = replace(HEALTHY, loading_s=6.0, first_loading_s=5.0, compute_s=13.0)
    assert said(starts, replace(starts, rank=1)) == [("training_waits_for_first_batches", "")]
    assert said(replace(starts, first_loading_s=3.5), replace(starts, rank=1, first_loading_s=3.5)) == []
    in_turn = replace(HEALTHY, late_share=0.4, compute_s=5.0)
    assert said(in_turn, replace(in_turn, rank=1, late_share=0.5)) == []
    starved = replace(HEALTHY, queue_s=9.0, compute_s=5.0)
    waits = "ranks_wait_for_processors"
    for share, says in ((0.02, waits), (0.6, waits), (0.95, "rank_is_slow")):
        assert [id for id, _ in said(starved, replace(starved, rank=1, late_share=share))] == [says]
    slow = replace(starved, rank=1, late_share=0.5, loading_s=6.0)
    assert said(starved, slow) == [("rank_is_slow", "slow_by_loading")]
    talks = replace(HEALTHY, compute_s=5.0)
    assert said(talks, replace(talks, rank=1)) == [("ranks_mostly_communicate", "")]
    # Of what is sent to a single rank it is not known who waits for whom.
    assert said(replace(talks, sends=True), replace(talks, rank=1, sends=True)) == []
    assert said(replace(talks, late_share=None), replace(talks, rank=1, late_share=None)) == []


def test_a_context_on_gpu_0_is_extra_beside_one_on_another() -> None:
    pids = {0: 10, 1: 11}
    assert extra_contexts(pids, [{10: 5}, {11: 7}]) is None
    assert extra_contexts({0: 10}, []) is None
    found = extra_contexts(pids, [{10: 5, 11: 3}, {11: 7}])
    assert found and found.id == "ranks_hold_a_context_on_gpu_0" and found.fields["ranks"] == [1]
