"""Pipeline: items pass through named stages, each in a thread of its own, with a short bounded queue after each.

It knows neither torch nor training. While the consumer works on one item, the next ones are on their way:

    for batch in Pipeline(loader, {"gather": to_gpu}):
        train(batch)

Order is kept. A stage waits only where `depth` items already wait behind it. Threads overlap where the work leaves
Python's lock: reading, decoding, copying, waiting for other processes.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import add_note

PATIENCE_S = 5.0  # for a stage that is busy when the pipeline is closed: a thread cannot be interrupted
SOURCE, CONSUMER = "sample", "train"  # their names in errors and traces, unless others are given


class Span(NamedTuple):
    """What one stage did with one item, numbered from 0: seconds on time.perf_counter's clock."""

    stage: str
    item: int
    start_s: float
    end_s: float


class Pipeline:
    """An iterable over `source` whose items have passed through `stages`, in order; each iteration starts anew.

    stages: name -> function of one item, in their order. depth: items that may wait behind each stage.
    trace: where each stage's work is noted, also the source's (as names[0]) and the consumer's (names[1]).

    An error of a stage reaches the consumer as it is, type and all, after the items that were ahead of it; a note on
    it says which stage and item it was. However an iteration ends, no thread is left: one that is busy ends with its
    item. The source is opened, used and closed in its thread.
    """

    def __init__(
        self,
        source: Iterable[Any],
        stages: Mapping[str, Callable[[Any], Any]],
        *,
        depth: int = 2,
        trace: list[Span] | None = None,
        names: tuple[str, str] = (SOURCE, CONSUMER),
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be 1 or more")
        self.source, self.stages, self.depth, self.trace, self.names = source, dict(stages), depth, trace, names

    def __iter__(self) -> Iterator[Any]:
        queues = [_Queue(self.depth) for _ in range(1 + len(self.stages))]
        works: list[Any] = [(self.names[0], None, None, queues[0])]
        works += [(name, self.stages[name], *ends) for name, *ends in zip(self.stages, queues, queues[1:])]
        threads = [threading.Thread(target=self._work, args=work, name=work[0], daemon=True) for work in works]
        try:
            for thread in threads:
                thread.start()
            for number in count():
                item = queues[-1].get()
                if isinstance(item, _End):
                    if item.error:
                        raise item.error
                    return
                start = time.perf_counter()
                yield item
                self._note(self.names[1], number, start)
        finally:
            for queue in queues:
                queue.close()
            for thread in threads:
                # Not this one: garbage collection may close a forgotten iteration in any thread.
                if thread.is_alive() and thread is not threading.current_thread():
                    thread.join(PATIENCE_S)

    def _work(self, name: str, function: Callable[[Any], Any] | None, before: _Queue | None, after: _Queue) -> None:
        """The life of one thread: a stage's, or the source's, which has no function and nothing before it."""
        number, items = 0, None
        try:
            if before is None:
                items = iter(self.source)
                function = lambda _: next(items, _End())  # noqa: E731
            assert function
            for number in count():
                item = before.get() if before else None
                start = time.perf_counter()
                made = item if isinstance(item, _End) else function(item)
                if isinstance(made, _End):
                    after.put(made)
                    return
                self._note(name, number, start)
                after.put(made)
        except _Closed:
            return
        except BaseException as error:
            add_note(error, f"in the pipeline's stage '{name}', item {number}")
            with suppress(_Closed):
                after.put(_End(error))
        finally:
            if isinstance(items, Generator):  # its own `finally` belongs to this thread, and is not left to chance
                items.close()

    def _note(self, stage: str, number: int, start: float) -> None:
        if self.trace is not None:
            self.trace.append(Span(stage, number, start, time.perf_counter()))


class _End(NamedTuple):
    """What follows the last item: nothing more, or the error that ended it."""

    error: BaseException | None = None


class _Closed(Exception):
    """The queue has been closed: nobody wants what is in it."""


class _Queue:
    """A bounded queue that can be closed, which wakes up whoever waits at either end (queue.Queue: from 3.13 on)."""

    def __init__(self, depth: int) -> None:
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._depth, self._closed = depth, False

    def put(self, item: Any) -> None:
        with self._changed:
            while len(self._items) >= self._depth and not self._closed:
                self._changed.wait()
            if self._closed:
                raise _Closed
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Any:
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait()
            if self._closed:
                raise _Closed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def write_trace(trace: Sequence[Span], path: Path) -> None:
    """Writes `trace` for chrome://tracing or https://ui.perfetto.dev: a row for each stage, times from the first span.

    Source: "Trace Event Format", Google, 2016 ('X' events: ts and dur in microseconds).
    """
    began = min((span.start_s for span in trace), default=0.0)
    rows = {stage: row for row, stage in enumerate(dict.fromkeys(span.stage for span in trace))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": stage}} for stage, row in rows.items()
    ]
    events += [
        {
            "ph": "X",
            "name": f"{span.stage} {span.item}",
            "cat": "pipeline",
            "pid": 0,
            "tid": rows[span.stage],
            "ts": (span.start_s - began) * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
        for span in trace
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
