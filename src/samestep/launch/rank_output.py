"""What ranks print, as it appears in their logs: prefixed by rank, equal lines of many ranks told once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

TRACEBACK = "Traceback (most recent call last):"
HOLD_S = 5.0  # how long a traceback waits for its run to fail; one that goes on has caught it, and prints it
MOST = 200  # lines of one rank that are told at a time
WAIT_S = 0.5  # how long a line waits for the other ranks to say the same


class RankOutput:
    """Follows rank*.log in `folder`. say: given (ranks, line)."""

    def __init__(self, folder: Path, say: Callable[[list[int], str], None]) -> None:
        self._folder, self._say = folder, say
        self._logs: dict[int, IO[str]] = {}
        self._begun: dict[int, str] = {}  # of a line whose end is not written yet
        self._waiting: dict[int, deque[tuple[float, str]]] = {}
        # Since a rank's traceback began: a failing run ends with its one sentence, and this is never told.
        self._held: dict[int, tuple[float, list[str]]] = {}

    def look(self, *, last: bool = False) -> None:
        """Tells what is new. last: waits for nothing more, and tells all."""
        self._read(last)
        now = time.monotonic()
        while any(self._waiting.values()):
            oldest = min((queue[0][0], rank) for rank, queue in self._waiting.items() if queue)[1]
            came, text = self._waiting[oldest][0]
            alike = sorted(rank for rank, queue in self._waiting.items() if queue and queue[0][1] == text)
            if len(alike) < len(self._waiting) and now - came < WAIT_S and not last:
                return
            for rank in alike:
                self._waiting[rank].popleft()
            self._say(alike, text)

    def _read(self, last: bool) -> None:
        for path in self._folder.glob("rank*.log"):
            rank = int(path.stem.removeprefix("rank"))
            if rank not in self._logs:
                self._logs[rank] = open(path, errors="replace", newline="\n")  # noqa: SIM115 - read until the end
                self._waiting[rank] = deque()
        now = time.monotonic()
        for rank, log in self._logs.items():
            text = self._begun.pop(rank, "") + log.read()
            *whole, rest = text.split("\n")
            if rest and not last:
                self._begun[rank] = rest
            elif rest:
                whole.append(rest)
            if TRACEBACK in whole and rank not in self._held:
                self._held[rank] = (now, [])
            if rank in self._held:
                since, held = self._held[rank]
                kept = [] if held else whole[: whole.index(TRACEBACK)]
                held += whole[len(kept) :]
                whole = kept
                if last or now - since > HOLD_S:
                    whole = kept + self._held.pop(rank)[1]
            # A bar that draws itself again and again counts as its last state.
            self._waiting[rank] += [(now, line.rstrip("\r").rsplit("\r", 1)[-1]) for line in whole[-MOST:]]
            if len(whole) > MOST:  # telling all would take longer than the training
                self._waiting[rank].append((now, f"… {len(whole) - MOST} lines more in {self._folder}/rank{rank}.log"))


def name(ranks: list[int]) -> str:
    """'rank 0', 'ranks 0-3', 'ranks 0,2'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {','.join(map(str, ranks))}"
