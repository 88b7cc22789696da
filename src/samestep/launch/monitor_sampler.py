"""Samples what this command's processes use, while they run: usage.csv, and the figures over it in usage.json."""

from __future__ import annotations

import csv
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from samestep.message import message
from samestep.records.files import write
from samestep.records.monitor import CSV, SUMMARY, MonitorSummary, RankUse, Sample, header, row, summary_of, thinned
from samestep.world.nvidia import Gpus
from samestep.world.regular_files import open_new
from samestep.world.resources import ProcessTree, machine_use

INTERVAL_S = 1.0
SHARE, OFTEN_SHARE = 0.002, 0.01  # of one core, that sampling may take; where less than INTERVAL_S is asked for


class MonitorSampler:
    """Samples this process's descendants, but for those with a pid in `without`, into files in `folder`.

    interval: seconds between two samples; longer where a sample would take more of a core than it may, as on a machine
    with thousands of processes. A disk that is full loses lines of the file, and ends nothing.
    """

    def __init__(self, folder: Path, interval: float = INTERVAL_S, without: Collection[int] = ()) -> None:
        self.folder, self.interval = folder, interval
        self._share = SHARE if interval >= INTERVAL_S else OFTEN_SHARE
        self.cost_s = 0.0  # CPU seconds that sampling has taken
        self.samples: list[Sample] = []
        self._gpus, self._tree = Gpus(), ProcessTree(without)
        self._machine, self._started = machine_use(), time.monotonic()
        self._readable = True
        self._due = 0.0
        self._file: IO[str] | None = None
        self._rows: Any = None
        with suppress(OSError):  # a full disk
            self._file = open_new(folder / CSV, text=True, buffering=1)
            self._rows = csv.writer(self._file)
        self._write(header(len(self._gpus)))
        self.sample()

    def due_in(self) -> float:
        """Returns the seconds until the next sample is due; 0: now."""
        return max(0.0, self._due - time.monotonic())

    def contexts(self) -> tuple[dict[int, int], ...]:
        """Returns, for each GPU, pid -> the bytes of the processes that hold a context on it."""
        return self._gpus.contexts()

    def sample_if_due(self) -> None:
        """Takes a sample, if it is time."""
        if not self.due_in():
            self.sample()

    def sample(self) -> Sample:
        """Takes a sample, and writes its line."""
        began = time.thread_time()
        tree, machine, before = self._tree.use(), machine_use(), self._machine
        self._readable &= tree.readable
        sample = Sample(
            time.monotonic() - self._started,
            tree.processes,
            tree.cpu_s,
            memory=tree.memory,
            read=tree.read,
            written=tree.written,
            machine_cpu_s=machine.cpu_s - before.cpu_s,
            machine_memory=machine.memory,
            received=machine.received - before.received,
            sent=machine.sent - before.sent,
            local=machine.local - before.local,
            gpus=self._gpus.use(self._tree.pids()),
        )
        self.samples.append(sample)
        self.samples = thinned(self.samples)
        self._write(row(sample))
        cost = time.thread_time() - began
        self.cost_s += cost
        self._due = time.monotonic() + max(self.interval, cost / self._share)
        return sample

    def close(
        self, command: Sequence[str] = (), exit_code: int | None = None, ranks: Sequence[RankUse] = ()
    ) -> MonitorSummary:
        """Takes a last sample, and writes usage.json. Returns what is in it."""
        self.sample()
        if self._file:
            with suppress(OSError):
                self._file.close()
            self._file = None
        notes = []
        if self._gpus.missing not in ("", "no driver"):
            notes.append(message("gpus_are_not_monitored", nvml=self._gpus.missing))
        if not self._readable:
            notes.append(message("disk_bytes_of_other_users_are_unknown"))
        started = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - self.samples[-1].seconds))
        summary = replace(
            summary_of(self.samples, monitor_s=self.cost_s, notes=notes),
            command=tuple(command),
            exit_code=exit_code,
            started=started,
            ranks=tuple(ranks),
        )
        with suppress(OSError):
            write(self.folder / SUMMARY, summary)
        return summary

    def _write(self, values: Sequence[object]) -> None:
        if self._file:
            with suppress(OSError):
                self._rows.writerow(values)
