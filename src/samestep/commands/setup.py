"""Setup: what the user asks of a command, checked as far as it can be without starting anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samestep import engine, launch
from samestep.errors import UserError

FOREVER_S = 1e6  # sockets take no longer waits


@dataclass(frozen=True)
class MachineOptions:
    """Which machines train, and where they meet. All have their defaults where everything is on this machine.

    nnodes: how many; None: 1, or the Slurm job's. node_rank: this one's number; None: they number themselves.
    master_addr, port: where the ranks meet; 0: any free port. hosts: machines that mpirun starts on. interface: of gloo
    and NCCL. max_restarts: how often torchrun starts all ranks again. timeout_s: that a rank waits for the others.
    """

    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str = ""
    port: int = 0
    hosts: tuple[str, ...] = ()
    interface: str = ""
    max_restarts: int = 0
    timeout_s: float = 120.0


@dataclass(frozen=True)
class Setup:
    """What to train, on what, and how to prove or measure it. Raises UserError for what cannot be.

    job: a built-in job, file.py:function or package.module:function. settings: the texts of --set. engines: none for
    all of them. engine_settings: the texts of --set-engine. launchers: none for each engine's first, or 'all'.
    nproc: ranks on each machine; None: one for each GPU, or 2 on a CPU. out: the folder for the results; None: a dated
    one under runs/. steps: optimizer steps of each training of the proof. rounds: launches of each engine that are
    measured, 0: it is only proven; warmup_steps of each are left out, measured_steps count. deadline_s: seconds after
    which a launch is ended.
    """

    job: str = "digits"
    settings: Mapping[str, str] = field(default_factory=dict)
    engines: tuple[str, ...] = ()
    engine_settings: Mapping[str, str] = field(default_factory=dict)
    launchers: tuple[str, ...] = ()
    nproc: int | None = None
    device: str = "auto"
    out: Path | None = None
    steps: int = 8
    rounds: int = 0
    warmup_steps: int = 20
    measured_steps: int = 100
    deadline_s: float | None = None
    machines: MachineOptions = MachineOptions()

    def __post_init__(self) -> None:
        cores = os.cpu_count() or 1
        if self.nproc is not None and self.nproc < 1:
            raise UserError(f"--nproc {self.nproc}: at least one rank must train; give --nproc 1 or more")
        if self.nproc is not None and self.nproc > 64 * cores:
            raise UserError(f"--nproc {self.nproc}: this machine has {cores} cores; give at most 64 ranks for each")
        for name in self.engines:
            engine.check(name)
        for name in self.launchers:
            if name != "all":
                launch.load(name)
        for option, seconds in (("timeout", self.machines.timeout_s), ("deadline", self.deadline_s)):
            if seconds is not None and not seconds < FOREVER_S:
                raise UserError(f"--{option} {seconds:g}: give at most {FOREVER_S:.0f} seconds")
