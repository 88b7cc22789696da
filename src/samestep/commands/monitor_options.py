"""The options of `samestep monitor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from samestep.commands.options import Options


@dataclass(frozen=True, kw_only=True)
class MonitorOptions(Options):
    """The options of `samestep monitor`. out: the folder for its files. interval: seconds between two samples."""

    out: Annotated[Path | None, Option(help="A new folder for usage.csv; by default a dated one under runs/.")] = None
    interval: Annotated[
        float,
        Option(help="Seconds from one sample to the next; more where a sample would take 1 % of a core.", min=0.05),
    ] = 1.0
