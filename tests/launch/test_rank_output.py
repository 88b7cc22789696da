"""What ranks print: prefixed, equal lines once, tracebacks left to the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.launch import rank_logs


@pytest.fixture
def told(tmp_path: Path) -> tuple[Path, rank_logs.RankOutput, list[tuple[str, str]]]:
    said: list[tuple[str, str]] = []
    return (
        tmp_path,
        rank_logs.RankOutput(tmp_path, lambda ranks, text: said.append((rank_logs.name(ranks), text))),
        said,
    )


def write(folder: Path, **logs: str) -> None:
    for name, text in logs.items():
        with open(folder / f"{name}.log", "a") as log:
            log.write(text)


def test_equal_lines_are_told_once(told: tuple[Path, rank_logs.RankOutput, list[tuple[str, str]]]) -> None:
    folder, follower, said = told
    write(folder, rank0="loading\nI am 0\n", rank1="loading\nI am 1\n", rank2="loading\n")
    follower.print_new()
    assert said == [("ranks 0-2", "loading")]  # the others may still say what rank 0 says
    follower.print_new(last=True)
    assert said == [("ranks 0-2", "loading"), ("rank 0", "I am 0"), ("rank 1", "I am 1")]


def test_a_line_is_told_when_the_others_stay_silent(
    told: tuple[Path, rank_logs.RankOutput, list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, follower, said = told
    write(folder, rank0="alone\n", rank1="")
    follower.print_new()
    assert said == []
    monkeypatch.setattr(rank_logs, "WAIT_S", 0.0)
    follower.print_new()
    assert said == [("rank 0", "alone")]


def test_half_a_line_waits_for_its_end(told: tuple[Path, rank_logs.RankOutput, list[tuple[str, str]]]) -> None:
    folder, follower, said = told
    write(folder, rank0="half")
    follower.print_new()
    assert said == []
    write(folder, rank0=" a line\n")
    follower.print_new(last=True)
    assert said == [("rank 0", "half a line")]


def test_a_bar_counts_as_its_last_state_and_a_traceback_stays_in_the_log(
    told: tuple[Path, rank_logs.RankOutput, list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, follower, said = told
    monkeypatch.setattr(rank_logs, "WAIT_S", 0.0)
    write(folder, rank0="10 %\r50 %\r100 %\n", rank1="before\nTraceback (most recent call last):\n  File x\n")
    follower.print_new()
    write(folder, rank1="RuntimeError: bad\n")
    follower.print_new()
    assert said == [("rank 0", "100 %"), ("rank 1", "before")]


def test_a_traceback_that_the_job_has_caught_is_told(
    told: tuple[Path, rank_logs.RankOutput, list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, follower, said = told
    monkeypatch.setattr(rank_logs, "HOLD_S", 0.0)
    monkeypatch.setattr(rank_logs, "WAIT_S", 0.0)
    write(folder, rank0="Traceback (most recent call last):\n  File x\nValueError: caught\n")
    follower.print_new()
    write(folder, rank0="and on\n")
    follower.print_new()
    write(folder, rank0="and on\n")
    follower.print_new()
    assert [text for _, text in said][-3:] == ["ValueError: caught", "and on", "and on"]


def test_names() -> None:
    assert [rank_logs.name(ranks) for ranks in ([0], [0, 1, 2], [0, 2])] == ["rank 0", "ranks 0-2", "ranks 0,2"]
