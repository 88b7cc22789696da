"""The options of `samestep doctor`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from samestep.commands.command_options import Device, Launcher, Out, one_launcher
from samestep.commands.machine_options import MachineOptions
from samestep.commands.options import Options
from samestep.commands.setup import Setup


@dataclass(frozen=True)
class DoctorOptions(Options):
    """The options of `samestep doctor`. job: its file must be the same on all machines; '': not compared. out: the
    folder whose disk is looked at; None: runs/. quick: leaves out the probes that need torch."""

    NOT_TYPED = ("max_restarts", "threads", "interface")  # of a training alone

    job: Annotated[str, Argument(metavar="[JOB]", help="A job whose file must be the same on all machines.")] = ""
    _: KW_ONLY
    nproc: Annotated[
        int | None, Option(help="Ranks on each machine; by default one for each GPU, or 2 on a CPU.", min=1)
    ] = None
    out: Out = None
    device: Device = "auto"
    launcher: Launcher = ""
    quick: Annotated[
        bool,
        Option("--quick", help="Skip the probes that import torch: its build, engine packages, a trial process group."),
    ] = False
    machines: MachineOptions = MachineOptions()  # noqa: RUF009 - frozen

    def setup(self) -> Setup:
        """Returns the setup of a training with these options."""
        return Setup(
            job=self.job or "digits",
            launchers=one_launcher(self.launcher),
            nproc=self.nproc,
            device=self.device,
            out=Path(self.out) if self.out else None,
            machines=self.machines,
        )
