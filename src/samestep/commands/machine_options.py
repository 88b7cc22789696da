"""The options of the machines that train: one field each, for the command line and for Python."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from samestep.commands.options import Names, Options, Typed, names
from samestep.errors import UserError

MOST_THREADS = 4096  # the most threads of a rank
Threads = Annotated[
    int | None,
    Option(
        help="Threads of each rank; by default OMP_NUM_THREADS, or this machine's cores divided by its ranks; in a "
        "proof 1.",
        min=1,
        max=MOST_THREADS,
    ),
]
MeshOption = Annotated[
    str | Mapping[str, int],
    Typed(str, "", words="axes and their sizes, as in 'data=2,tensor=2'"),
    Option("--mesh", metavar="AXIS=SIZE,…", help="How the ranks are arranged, as in data=2,tensor=2."),
]


def machine_count(given: int | str | None, flag: str) -> int | str | None:
    """Parses '3' into 3, and leaves '1:3', the fewest and the most machines, as it is. Raises UserError for others."""
    if given is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", str(given).strip())
    if match is None or (match[2] and int(match[1]) > int(match[2])):
        raise UserError(f"{flag} {given}: give a number of machines, or the fewest and the most, as in 1:3")
    return f"{match[1]}:{match[2]}" if match[2] else int(match[1])


@dataclass(frozen=True)
class MachineOptions(Options):
    """The machines that train, and their rendezvous. The defaults are for one machine.

    nnodes: the number of machines; None: 1, or the Slurm job's; '1:3': from 1 to 3, which may leave and join.
    node_rank: this machine's number; None: assigned by the
    rendezvous. master_addr, port: of the rendezvous; port 0: any free one. hosts: the machines for mpirun. interface:
    for gloo and NCCL. max_restarts: as torchrun's. timeout_s: how long a rank waits for the others. threads: of each
    rank; None: OMP_NUM_THREADS, or else the machine's cores divided by its ranks, and 1 in a proof.
    """

    nnodes: Annotated[
        int | str | None,
        Typed(str | None, None, machine_count, "a number of machines, or the fewest and the most, as in '1:3'"),
        Option(
            metavar="N|MIN:MAX",
            help="Machines: 1, or the Slurm job's. 1:3: from 1 to 3, which may leave and join. Run the same command "
            "on each.",
        ),
    ] = None
    node_rank: Annotated[
        int | None, Option(help="This machine's number; by default the rendezvous numbers the machines.", min=0)
    ] = None
    master_addr: Annotated[str, Option(help="The machine of the rendezvous, by name or address.")] = ""
    port: Annotated[
        int,
        Option("--port", "--master-port", help="The port of the rendezvous; 0: any free one.", min=0, max=65535),
    ] = 0
    hosts: Annotated[
        Names,
        Typed(str, "", names, words="the name of a machine, or a list of names"),
        Option(help="Machines that mpirun starts on, separated by commas."),
    ] = ()
    interface: Annotated[
        str, Option(help="The network interface for gloo and NCCL; by default the one that leads to the master.")
    ] = ""
    max_restarts: Annotated[int, Option(help="How often torchrun restarts all ranks after one has died.", min=0)] = 0
    timeout_s: Annotated[float, Option("--timeout", help="Seconds that a rank waits for the others.", min=1)] = 120.0
    threads: Threads = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "hosts", names(self.hosts, "--hosts"))
        object.__setattr__(self, "nnodes", machine_count(self.nnodes, "--nnodes"))
        for host in self.hosts:
            if not re.fullmatch(r"[\w\[][\w.:%\]-]*", host):  # ssh would take one that begins with - for an option
                raise UserError(f"--hosts {host!r}: this is not a machine's name or address; write them as in h1,h2")

    @property
    def max_nnodes(self) -> int | None:
        """The number of machines, the greatest where it may change; None: 1, or the Slurm job's."""
        return int(self.nnodes.partition(":")[2]) if isinstance(self.nnodes, str) else self.nnodes

    @property
    def min_nnodes(self) -> int:
        """The fewest machines that train on where others leave; 0: all must stay."""
        return int(self.nnodes.partition(":")[0]) if isinstance(self.nnodes, str) else 0

    @property
    def planned_threads(self) -> int:
        """The threads of a rank that measures or trains; 0: the machine's cores divided by its ranks."""
        chosen = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is for nested regions
        if self.threads or not (chosen.isdecimal() and int(chosen[:9]) <= MOST_THREADS):
            return self.threads or 0
        return int(chosen)
