"""The other machines of a verify or compare: they start their ranks of each launch that the first machine starts.

The first machine tells in its folder, which all must share, what it does now, and tells it anew every second while it
lives. No torch, no port: files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.commands.study import Study
from samestep.errors import TrainingFailed, UserError
from samestep.launch import supervise
from samestep.launch.command import command_for
from samestep.records.files import read, write

NEWS = "first-machine.json"
SHARED_S = 120.0  # the first news must come so soon, and the next
BEAT_S = 1.0


@dataclass(frozen=True)
class Launch:
    """A launch to take part in. folder: below the shared one. nproc: ranks on each machine, size: on all of them.
    started_at: in seconds since 1970; a launch that is started again has another."""

    folder: str
    launcher: str
    nproc: int
    size: int
    devices: tuple[str, ...]
    started_at: float


@dataclass(frozen=True)
class News:
    """What the first machine does. told_at: in seconds since 1970."""

    launch: Launch | None = None
    ended: bool = False
    told_at: float = 0.0


def publish(folder: Path, launch: Launch | None = None) -> None:
    """Tells the other machines that the first one lives, at most once a second; a new launch at once."""
    path = folder / NEWS
    if launch is None and path.exists() and time.time() - path.stat().st_mtime < BEAT_S:
        return
    news = _news(folder) or News()
    write(path, replace(news, launch=launch or news.launch, told_at=time.time()))


@contextmanager
def publishing(study: Study, folder: Path) -> Iterator[None]:
    """Around what the first machine does: however it ends, it tells the others."""
    if study.machines.nnodes == 1 or study.machines.single_launch:
        yield
        return
    write(folder / NEWS, News(told_at=time.time()))
    try:
        yield
    finally:
        write(folder / NEWS, News(ended=True, told_at=time.time()))


def join_launches(study: Study, folder: Path) -> int:
    """Starts this machine's ranks of each launch, until the first machine has ended. Returns the number of launches.

    Raises UserError when nothing is heard from the first machine.
    """
    known, heard_at = _news(folder), time.monotonic()
    joined: list[Launch] = []
    while True:
        news = _news(folder)
        if news and news != known:
            known, heard_at = news, time.monotonic()
            if news.ended:
                return len(joined)
            if news.launch and news.launch not in joined:
                joined.append(news.launch)
                _join(study, folder, news.launch)
        if time.monotonic() - heard_at > SHARED_S:
            raise UserError(
                f"nothing was heard from the first machine ({study.machines.master}) in {folder} for {SHARED_S:.0f} s; "
                "see that it runs the same line, and that --out names a folder that the machines share"
            )
        time.sleep(0.05)


def _news(folder: Path) -> News | None:
    with suppress(FileNotFoundError):
        return read(News, folder / NEWS)
    return None


def _join(study: Study, folder: Path, launch: Launch) -> None:
    """This machine's part of one launch. A failure is the first machine's to judge: it shows in the shared records."""
    where = folder / launch.folder
    command = command_for(where / "plan.json", launch.launcher, launch.nproc, launch.devices, study.machines)
    with suppress(TrainingFailed, UserError):
        supervise.run(command, where, launch.size, deadline_s=study.setup.deadline_s, machines=study.machines)
