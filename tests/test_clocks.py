"""The clock decides nothing: where a clock is read in a room that looks for evidence, it is said what for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "samestep"
ROOMS = ("proof", "reference", "tasks", "data", "job", "records", "recorder")
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns"}
CLOCKS |= {"thread_time", "thread_time_ns", "time_ns", "getrusage", "clock_gettime"}
# module -> what it reads a clock for: it measures, and tells what it measured; or it waits for others, and says so when
# they do not come
READERS = {
    "data/loader.py": "measures what reading takes",
    "data/pipeline.py": "measures when a stage worked",
    "data/workers.py": "measures what reading takes",
    "recorder/pipeline_replay.py": "waits for what other ranks have kept, and says which has not come",
    "recorder/monitored_rank.py": "measures a step and what reading takes",
    "recorder/recorder.py": "measures what recording takes, and a step",
    "recorder/run_script.py": "waits at the end for the other ranks, whose last step may need this process",
    "recorder/steps_alone.py": "waits for a step of another rank, which may be of another training",
    "recorder/steps_to_record.py": "waits for the other ranks, to end after the same step; without them ends as asked",
    "recorder/watch.py": "waits for the other ranks' records, and says which has not come",
    "tasks/collectives/__init__.py": "measures collectives",
    "tasks/inspect/dry_run.py": "measures a step, for an estimate that is told",
    "tasks/reference_steps.py": "paces the file of its progress",
    "tasks/replay_step.py": "waits for other ranks' parts, and says which has not come; measures a replay",
    "tasks/try_group.py": "measures a process group",
}


def clocks_in(source: str) -> Iterator[str]:
    """Yields the clocks that a module reads, of whatever module they are taken."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS:
            yield node.attr
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "resource"):
            yield from (alias.name for alias in node.names)


def test_a_clock_is_read_only_to_measure_or_to_wait() -> None:
    paths = [path for room in ROOMS for path in (SOURCE / room).rglob("*.py")]
    read = {path.relative_to(SOURCE).as_posix() for path in paths if any(clocks_in(path.read_text(encoding="utf-8")))}
    assert read == {*READERS}


@pytest.mark.parametrize("source", ["import time\nuntil = time.monotonic() + 1", "from time import process_time"])
def test_a_clock_is_found(source: str) -> None:
    assert [*clocks_in(source)]
