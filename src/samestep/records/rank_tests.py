"""What pytest's process and the processes of a test's ranks send each other, pickled, through a socket."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

# On this signal a rank's process dumps its threads' stacks; one that tests rarely use.
DUMP_STACKS = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2


@dataclass(frozen=True)
class PytestSession:
    """How a rank prepares a pytest session like that of the command."""

    arguments: tuple[str, ...]
    """The arguments of the pytest command."""

    sys_path: tuple[str, ...]
    """The folders in which the command finds its modules: its sys.path."""

    basetemp: str
    """The folder of this rank's tmp_path."""

    out: str | None
    """The file that receives what the rank prints on stdout. None: it prints on the terminal, as under --pdb."""

    err: str | None
    """The file that receives what the rank prints on stderr. None: it prints on the terminal, as under --pdb."""


@dataclass(frozen=True)
class RunTest:
    """A test that a rank's process is to run."""

    nodeid: str
    """The node id of the test."""

    file: str
    """The path of the file that holds the test."""

    rank: int
    """The number of the rank. 0 where the ranks are threads."""

    size: int
    """The number of ranks."""

    threads: bool
    """Whether all ranks are threads of the process that receives this."""

    backend: str | None
    """The backend of torch.distributed. None: no process group is opened for the test."""

    timeout_s: float
    """How many seconds the test may take."""

    keep: int
    """How many of the test's collectors, from the session down, the next test shares: their fixtures stay. 0: all
    end."""

    store: str
    """The path of the file through which the ranks meet."""

    port: int
    """A free port, for a test that opens a process group itself."""

    shared_folder: str
    """The path of the folder that all ranks of the test share."""


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
