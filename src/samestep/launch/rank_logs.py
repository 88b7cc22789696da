"""Follows the ranks' logs and prints their lines, prefixed by rank; a line that several ranks print appears once."""

from __future__ import annotations

import codecs
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from samestep.errors import LONGEST_MESSAGE
from samestep.world.regular_files import move_file, open_end, open_new, open_regular, paths_in, remove_file

TRACEBACK = "Traceback (most recent call last):"
HOLD_S = 5.0  # a traceback is printed after so long, unless the run has failed by then and reports the error itself
MAX_LINES = 200  # printed of one rank at a time
WAIT_S = 0.5  # how long a line waits for the other ranks to print the same


class RankOutput:
    """Follows rank*.log in `folder`. print_line: called with (ranks, line)."""

    def __init__(self, folder: Path, print_line: Callable[[list[int], str], None]) -> None:
        self._folder, self._print_line = folder, print_line
        self._logs: dict[int, IO[bytes]] = {}
        self._cuts: dict[int, object] = {}  # rank -> what tells that its log has been cut
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._partial: dict[int, str] = {}  # rank -> the start of a line whose end is not written yet
        self._waiting: dict[int, deque[tuple[float, str]]] = {}
        # rank -> (time, lines) since the start of a traceback. Never printed when the run fails: it reports the error.
        self._held: dict[int, tuple[float, list[str]]] = {}

    def print_new(self, *, last: bool = False) -> None:
        """Prints the new lines. last: prints all lines, and waits for no other rank."""
        self._read(last)
        now = time.monotonic()
        while any(self._waiting.values()):
            oldest = min((queue[0][0], rank) for rank, queue in self._waiting.items() if queue)[1]
            read_at, text = self._waiting[oldest][0]
            ranks = sorted(rank for rank, queue in self._waiting.items() if queue and queue[0][1] == text)
            if len(ranks) < len(self._waiting) and now - read_at < WAIT_S and not last:
                return
            for rank in ranks:
                self._waiting[rank].popleft()
            self._print_line(ranks, text)

    def _read(self, last: bool) -> None:
        for rank, path in _logs_in(self._folder).items():
            if rank not in self._logs:
                try:
                    self._logs[rank] = open_regular(path, buffering=0)
                except FileNotFoundError:  # somebody has removed it meanwhile
                    continue
                self._decoders[rank] = codecs.getincrementaldecoder("utf-8")(errors="replace")
                self._waiting[rank] = deque()
        now = time.monotonic()
        for rank, log in self._logs.items():
            cuts = cuts_of(self._folder / f"rank{rank}.log")
            if cuts != self._cuts.get(rank, cuts) or os.fstat(log.fileno()).st_size < log.tell():
                log.seek(0)
            self._cuts[rank] = cuts
            text = self._partial.pop(rank, "") + self._decoders[rank].decode(log.read())
            *lines, unfinished = text.split("\n")
            if unfinished and not last:
                self._partial[rank] = unfinished[-LONGEST_MESSAGE:]
            elif unfinished:
                lines.append(unfinished)
            if TRACEBACK in lines and rank not in self._held:
                self._held[rank] = (now, [])
            if rank in self._held:
                since, held = self._held[rank]
                before = [] if held else lines[: lines.index(TRACEBACK)]
                held += lines[len(before) :]
                lines = before
                if last or now - since > HOLD_S:
                    lines = before + self._held.pop(rank)[1]
            # Of a progress bar, which rewrites its line, only the last state counts.
            self._waiting[rank] += [
                (now, line.rstrip("\r").rsplit("\r", 1)[-1][:LONGEST_MESSAGE]) for line in lines[-MAX_LINES:]
            ]
            if len(lines) > MAX_LINES:  # printing all could take longer than the training
                self._waiting[rank].append(
                    (now, f"… {len(lines) - MAX_LINES} lines more in {self._folder}/rank{rank}.log")
                )


def _logs_in(folder: Path) -> dict[int, Path]:
    """Returns the logs of the ranks: rank0.log, rank1.log, …, and no file of a like name."""
    named = {path: re.fullmatch(r"rank(\d{1,9})\.log", path.name) for path in paths_in(folder, "rank*.log")}
    return {int(number[1]): path for path, number in named.items() if number}


def name(ranks: list[int]) -> str:
    """Returns 'rank 0', 'ranks 0-3' or 'ranks 0,2'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {','.join(map(str, ranks))}"


LIMIT = 10_000_000  # bytes of one log; together with the copy a rank has at most about twice as many
EVERY_S = 1.0


class LogRotation:
    """Watches the logs of the ranks in `folder`."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self._folder, self._limit, self._looked_at = folder, limit, time.monotonic()

    def rotate(self) -> None:
        """Cuts the logs that are too long; looks once a second. A full disk loses the copy, not the training."""
        if time.monotonic() - self._looked_at < EVERY_S:
            return
        self._looked_at = time.monotonic()
        for log in _logs_in(self._folder).values():
            with suppress(OSError):
                if log.stat().st_size > self._limit:
                    cut(log)


def cuts_of(log: Path) -> object:
    """Returns what changes when a log is cut: its length alone would not show it, where it has grown again."""
    try:
        copy = log.with_name(f"{log.name}.1").stat()
    except OSError:
        return None
    return copy.st_ino, copy.st_mtime_ns


def cut(log: Path) -> None:
    """Moves what a log holds to a second file of its name and '.1', and leaves it empty."""
    part = log.with_name(f".{log.name}.part")
    try:
        with open_regular(log) as old, open_new(part) as new:
            shutil.copyfileobj(old, new)
        move_file(part, log.with_name(f"{log.name}.1"))
    except OSError:  # the disk is full: the log has filled it
        with suppress(OSError):
            remove_file(part)
    finally:
        with open_end(log) as emptied:
            emptied.truncate(0)
