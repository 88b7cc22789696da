"""The options of `samestep check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from samestep.commands.options import Options

LAUNCHERS = ("torchrun", "fork")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    """The options of `samestep check`. nproc: ranks. steps: optimizer steps to record, after which the script is
    ended. replay: whether to replay them in one process. module: whether the script is a module's name. out,
    deadline_s, stall_s: as of the other commands."""

    nproc: Annotated[int, Option(help="Ranks, all on this machine.", min=1)] = 2
    steps: Annotated[int, Option(help="Optimizer steps to record; the script is ended after them.", min=1)] = 8
    replay: Annotated[
        bool, Option("--replay/--no-replay", help="Replay the steps in one process, and compare; on by default.")
    ] = True
    module: Annotated[bool, Option("-m", help="SCRIPT is a module's dotted name, as for python -m.")] = False
    out: Annotated[Path | None, Option(help="Folder for the records; by default a dated one under runs/.")] = None
    launcher: Annotated[str, Option(help="torchrun; or fork, which imports torch once for all ranks (CPU only).")] = (
        LAUNCHERS[0]
    )
    deadline_s: Annotated[
        float | None, Option("--deadline", help="Seconds after which the script is ended, recorded or not.", min=1)
    ] = None
    stall_s: Annotated[
        float | None,
        Option("--stall", help="Seconds without progress after which the rank that hangs is named; 0: never.", min=0),
    ] = None
