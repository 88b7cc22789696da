"""The other machines of a verify or compare: they start their ranks of each launch that the first machine starts.

The first machine tells in its folder, which all must share, what it does now; its word changes every second while it
lives. No torch, no port: files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samestep.commands.study import Study
from samestep.errors import TrainingFailed, UserError
from samestep.launch import command, supervise
from samestep.records.record import write_json

WORD = "first-machine.json"
SHARED_S = 120.0  # the first word must come so soon, and the next
BEAT_S = 1.0


def tell(folder: Path, **news: Any) -> None:
    """The first machine says that it lives, at most once a second, or says `news` at once."""
    path = folder / WORD
    if not news and path.exists() and time.time() - path.stat().st_mtime < BEAT_S:
        return
    write_json(path, {"launch": None, "ended": False, **(_word(folder) or {}), **news, "time": time.time()})


@contextmanager
def ending(study: Study, folder: Path) -> Iterator[None]:
    """Around what the first machine does: however it ends, it tells the others."""
    if study.machines.nnodes == 1 or study.machines.reached:
        yield
        return
    tell(folder, launch=None, ended=False)
    try:
        yield
    finally:
        tell(folder, ended=True)


def follow(study: Study, folder: Path) -> int:
    """Starts this machine's ranks of each launch, until the first machine says that it has ended. Returns launches.

    Raises UserError when nothing is heard from the first machine.
    """
    known, heard_at, done = _word(folder), time.monotonic(), 0
    begun: set[str] = set()
    while True:
        word = _word(folder)
        if word != known:
            known, heard_at = word, time.monotonic()
            if word and word["ended"]:
                return done
            if word and word["launch"] and word["launch"]["id"] not in begun:
                begun.add(word["launch"]["id"])
                _join(study, folder, word["launch"])
                done += 1
        if time.monotonic() - heard_at > SHARED_S:
            raise UserError(
                f"nothing was heard from the first machine ({study.machines.master}) in {folder} for {SHARED_S:.0f} s; "
                "see that it runs the same line, and that --out names a folder that the machines share"
            )
        time.sleep(0.05)


def _word(folder: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        word: dict[str, Any] = json.loads((folder / WORD).read_text())
        return word
    return None


def _join(study: Study, folder: Path, asked: dict[str, Any]) -> None:
    """This machine's part of one launch. A failure is the first machine's to judge: it shows in the shared records."""
    where = folder / asked["folder"]
    plan = command.plan_for(where / "plan.json", asked["launcher"], asked["nproc"], asked["devices"], study.machines)
    with suppress(TrainingFailed, UserError):
        supervise.run(plan, where, asked["size"], deadline_s=study.deadline_s, machines=study.machines)
