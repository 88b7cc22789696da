"""The pipeline keeps the order and its bounds, hands errors on as they are, and leaves no thread behind."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from budget import budget, wait_until
from samestep import Pipeline
from samestep.data.pipeline import Span, write_trace
from samestep.errors import UserError


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before, "a thread is left", threading.enumerate)


def in_time(work: Callable[[], Any]) -> Any:
    """work(), in a thread that is given up after a deadline: no fault may hang the tests."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(budget())
    assert found, "it hangs"
    return found[0]


def test_items_pass_through_the_stages_in_order() -> None:
    stages = {"double": lambda n: 2 * n, "text": str}
    pipeline = Pipeline(range(200), stages, depth=3)
    assert in_time(lambda: [list(pipeline), list(pipeline)]) == [[str(2 * n) for n in range(200)]] * 2


def test_no_stages_and_no_items() -> None:
    assert in_time(lambda: list(Pipeline(range(5), {}))) == list(range(5))
    assert in_time(lambda: list(Pipeline([], {"double": lambda n: 2 * n}))) == []
    with pytest.raises(ValueError, match="depth is 0"):
        Pipeline([], {}, depth=0)


def test_none_and_false_are_items() -> None:
    assert in_time(lambda: list(Pipeline([None, False, 0], {"same": lambda item: item}))) == [None, False, 0]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_source_runs_ahead_as_far_as_the_bounds_and_no_further(depth: int) -> None:
    drawn: list[int] = []

    def source() -> Iterator[int]:
        for number in range(1000):
            drawn.append(number)
            yield number

    most = 2 * depth + 2  # a full queue behind each of two threads, and one item in the hands of each

    def look() -> tuple[int, int]:
        items = iter(Pipeline(source(), {"same": lambda n: n}, depth=depth))
        next(items)
        wait_until(lambda: len(drawn) > most, "the source stops early", lambda: drawn)
        time.sleep(budget(0.1))  # for a source that does not stop there
        seen = len(drawn)
        items.close()  # type: ignore[attr-defined]
        return seen, len(drawn)

    seen, after = in_time(look)
    assert seen == after == most + 1  # and the one that the consumer has


def test_stages_work_at_the_same_time() -> None:
    """Each of three parties waits for the other two at every item: only threads that overlap get past that."""
    meet = threading.Barrier(3, timeout=budget())

    def source() -> Iterator[int]:
        for number in range(12):
            if number >= 4:  # once the pipeline is full
                meet.wait()
            yield number

    def stage(number: int) -> int:
        if 2 <= number < 10:
            meet.wait()
        return number

    def consume() -> int:
        total = 0
        for number in Pipeline(source(), {"stage": stage}, depth=1):
            if number < 8:
                meet.wait()
            total += number
        return total

    assert in_time(consume) == sum(range(12))


class Odd(Exception):
    """With a signature that cannot be rebuilt from its message."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{number}: {why}")
        self.number = number


@pytest.mark.parametrize("where", ["sample", "double", "last"])
@pytest.mark.parametrize("error", [UserError("one sentence"), Odd(7, "odd"), KeyboardInterrupt(), StopIteration(3)])
def test_an_error_arrives_as_it_is_with_the_stages_name(where: str, error: BaseException) -> None:
    error.__notes__ = []

    def faulty(name: str) -> Callable[[int], int]:
        def stage(number: int) -> int:
            if name == where and number == 5:
                raise error
            return number

        return stage

    class Source:
        def __iter__(self) -> Iterator[int]:
            return map(faulty("sample"), range(1000))

    if where == "sample" and isinstance(error, StopIteration):
        return  # there it is the end

    def consume() -> tuple[list[int], BaseException | None]:
        seen = []
        try:
            for number in Pipeline(Source(), {"double": faulty("double"), "last": faulty("last")}):
                seen.append(number)
        except BaseException as raised:
            return seen, raised
        return seen, None

    seen, raised = in_time(consume)
    if isinstance(error, StopIteration):  # Python's own rule for generators: one that escapes becomes a RuntimeError
        assert isinstance(raised, RuntimeError) and raised.__cause__ is error
    else:
        assert raised is error
    assert seen == [0, 1, 2, 3, 4]  # what was ahead of it arrived
    (note,) = error.__notes__
    assert f"stage '{where}', item 5" in note


@pytest.mark.parametrize("way", ["break", "error", "close", "forgotten"])
def test_leaving_early_ends_the_threads_and_closes_the_source(way: str) -> None:
    closed: list[str] = []

    def source() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.append(threading.current_thread().name)

    pipeline = Pipeline(source(), {"same": lambda n: n})

    def leave() -> bool:
        if way in ("break", "error"):
            try:
                for number in pipeline:
                    if number == 3:
                        if way == "break":
                            break
                        raise ValueError
            except ValueError:
                pass
        else:
            items = iter(pipeline)
            next(items)
            if way == "close":
                items.close()  # type: ignore[attr-defined]
            del items
        return True

    assert in_time(leave)
    assert closed == ["sample"]  # by the thread that drew from it, before the consumer went on


def test_an_iteration_that_is_never_begun_starts_nothing() -> None:
    before = threading.active_count()
    items = iter(Pipeline(range(3), {}))
    assert threading.active_count() == before
    items.close()  # type: ignore[attr-defined]


def test_the_trace_tells_who_did_what_when_and_opens_in_a_browser(tmp_path: Path) -> None:
    trace: list[Span] = []
    assert in_time(lambda: list(Pipeline(range(6), {"slow": lambda n: time.sleep(0.002) or n}, trace=trace)))
    assert {span.stage for span in trace} == {"sample", "slow", "train"}
    for stage in ("sample", "slow", "train"):
        of_stage = [span for span in trace if span.stage == stage]
        assert [span.item for span in of_stage] == list(range(6))
        assert all(a.end_s <= b.start_s for a, b in pairwise(of_stage))  # one thread, one item at a time
    assert all(span.end_s - span.start_s >= 0.002 for span in trace if span.stage == "slow")
    write_trace(trace, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert rows.keys() == {"sample", "slow", "train"} and len(set(rows.values())) == 3
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == 18 and min(event["ts"] for event in drawn) == 0
    slow = next(event for event in drawn if event["name"] == "slow 4")
    assert slow["tid"] == rows["slow"] and slow["dur"] >= 2000  # microseconds
