"""Pipeline: passes items through named stages, each in its own thread, with a bounded queue after each.

It does not depend on torch or on training. While the consumer works on one item, the stages prepare the next ones:

    for batch in Pipeline(loader, {"gather": to_gpu}):
        train(batch)

The order is kept. A stage waits when `depth` of its results are queued. Threads overlap while the work releases the
GIL: reading, decoding, copying, waiting for other processes.
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

PATIENCE_S = 5.0  # to wait for a busy stage when the pipeline is closed: a thread cannot be interrupted
SOURCE, CONSUMER = "sample", "train"  # default names in errors and traces


class Span(NamedTuple):
    """When one stage worked on one item. item: counted from 0. start_s, end_s: time.perf_counter(), in seconds."""

    stage: str
    item: int
    start_s: float
    end_s: float


class Pipeline:
    """An iterable over `source` whose items have passed through `stages`, in order; each iteration starts anew.

    stages: name -> function of one item, in order. depth: items that may be queued after each stage.
    trace: a list to which each stage's spans are appended, and the source's and the consumer's. names: of these two.

    An error of a stage is raised to the consumer unchanged, after the items before it, with a note that names the stage
    and the item. When the iteration ends, for whatever reason, all threads end; a busy one ends after its item.
    The source is opened, read and closed in its own thread.
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
                self._trace(self.names[1], number, start)
        finally:
            for queue in queues:
                queue.close()
            for thread in threads:
                # Not this thread: garbage collection may close an abandoned iterator in any thread.
                if thread.is_alive() and thread is not threading.current_thread():
                    thread.join(PATIENCE_S)

    def _work(self, name: str, function: Callable[[Any], Any] | None, before: _Queue | None, after: _Queue) -> None:
        """Runs one stage in its thread. function, before: None for the source."""
        number, items = 0, None
        try:
            if before is None:
                items = iter(self.source)
                function = lambda _: next(items, _End())  # noqa: E731
            assert function
            for number in count():
                item = before.get() if before else None
                start = time.perf_counter()
                result = item if isinstance(item, _End) else function(item)
                if isinstance(result, _End):
                    after.put(result)
                    return
                self._trace(name, number, start)
                after.put(result)
        except _Closed:
            return
        except BaseException as error:
            add_note(error, f"in the pipeline's stage '{name}', item {number}")
            with suppress(_Closed):
                after.put(_End(error))
        finally:
            if isinstance(items, Generator):  # runs its `finally` in this thread
                items.close()

    def _trace(self, stage: str, number: int, start: float) -> None:
        if self.trace is not None:
            self.trace.append(Span(stage, number, start, time.perf_counter()))


class _End(NamedTuple):
    """Marks the end of the items. error: what ended them; None: there are no more."""

    error: BaseException | None = None


class _Closed(Exception):
    """Raised at both ends of a queue that has been closed."""


class _Queue:
    """A bounded queue with close(), which wakes the threads that wait (queue.Queue has it from 3.13 on)."""

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
    """Writes `trace` as JSON for chrome://tracing or https://ui.perfetto.dev, with a row for each stage.

    Times start at the first span.
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
