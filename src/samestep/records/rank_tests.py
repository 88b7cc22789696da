"""What pytest's process and the processes of a test's ranks send each other, pickled, through a socket."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

# On this signal a rank's process dumps its threads' stacks; one that tests rarely use.
DUMP_STACKS = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2


@dataclass(frozen=True)
class PytestSession:
    """How a rank prepares a pytest session like that of the command.

    arguments: of the command. sys_path: its modules' folders. basetemp: the folder of this rank's tmp_path. out, err:
    the files that receive what it prints, None under --pdb, where it prints on the terminal.
    """

    arguments: tuple[str, ...]
    sys_path: tuple[str, ...]
    basetemp: str
    out: str | None
    err: str | None


@dataclass(frozen=True)
class RunTest:
    """A test to run. size: ranks; threads: all of them are threads of the process that receives this.

    keep: how many of the test's collectors, from the session down, the next test shares: their fixtures stay; 0: all
    end. store: the path of the rendezvous. port: a free port, for a test that opens a group itself.
    """

    nodeid: str
    file: str
    rank: int
    size: int
    threads: bool
    backend: str | None
    timeout_s: float
    keep: int
    store: str
    port: int
    shared_folder: str


@dataclass(frozen=True)
class Opened:
    """The rank has opened its process group and found the test."""


@dataclass(frozen=True)
class PhaseReport:
    """pytest's report of a phase (setup, call, teardown) on a rank. out, err: bytes printed until then, in all."""

    rank: int
    report: Mapping[str, object]
    out: int
    err: int


@dataclass(frozen=True)
class Ended:
    """The test has ended on this process, unless `problem` says why it could not run; then the process ends."""

    problem: str = ""


@dataclass(frozen=True)
class AskState:
    """Asks a process what its ranks are doing."""


@dataclass(frozen=True)
class RankState:
    """What a rank is doing. stack: a Python traceback, the latest call last. collective: '' where none is known."""

    rank: int
    stack: str
    collective: str


@dataclass(frozen=True)
class ProcessState:
    """The answer to AskState."""

    ranks: tuple[RankState, ...]
