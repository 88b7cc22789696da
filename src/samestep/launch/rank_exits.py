"""Notes when and how ranks end that other processes have started: by the kernel, which no rank is asked for.

A process that has ended keeps its exit code until its parent has waited for it. torchrun looks ten times a second; a
launcher that waits all the time is often quicker, and then the code is not known.
"""

from __future__ import annotations

import os
import re
import select
import signal
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

from samestep.errors import printable
from samestep.world.regular_files import open_regular, read_regular

NEW_MS = 100  # until a process that is waited for is waited for by the kernel
MOST_BYTES = 1 << 16  # of what a process has printed last, and of its line in /proc
BY_LAUNCHER = (None, -signal.SIGTERM, -signal.SIGKILL)  # exit codes of a rank that its launcher may have ended
EXIT_CODE = 52  # the number of the exit code in /proc/PID/stat: see proc_pid_stat(5)
# What C++ prints of an exception that ends the process, as gloo's.
LAST_WORDS = re.compile(r"what\(\): +(.+)")
LONGEST = 300


class RankExits(threading.Thread):
    """Notes when processes end, at once: a launcher ends the others a tenth of a second after the first one.

    ended_at, code_of: by the process's id; a code is negative for a signal. output_of: the file that its standard error
    goes to, with the size that it had before.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._poll, self._pids = select.poll(), dict[int, int]()
        self.ended_at: dict[int, float] = {}
        self.code_of: dict[int, int] = {}
        self.output_of: dict[int, tuple[Path, int]] = {}

    def add(self, pid: int) -> None:
        """Waits for a process, too."""
        with suppress(OSError, AttributeError):  # it has ended; or an old kernel
            descriptor = os.pidfd_open(pid)
            self._pids[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)
            if not self.is_alive():
                self.start()
        with suppress(OSError):
            output = Path(os.readlink(f"/proc/{pid}/fd/2"))
            status = output.stat()
            if stat.S_ISREG(status.st_mode):  # not a terminal, and not a pipe
                self.output_of[pid] = output, status.st_size

    def run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll(NEW_MS):
                self._poll.unregister(descriptor)
                pid = self._pids.pop(descriptor)
                if (code := _exit_code(pid)) is not None:
                    self.code_of[pid] = code
                self.ended_at[pid] = time.time()
                os.close(descriptor)


def _exit_code(pid: int) -> int | None:
    """Returns the exit code of a process that has ended and was not waited for; None where it is not known."""
    with suppress(OSError, ValueError, IndexError):
        # The second field is a name, which may hold spaces.
        _, _, fields = read_regular(Path(f"/proc/{pid}/stat"), MOST_BYTES).rpartition(b")")
        state, *others = fields.split()
        if state == b"Z":
            return os.waitstatus_to_exitcode(int(others[EXIT_CODE - 4]))
    return None


def last_words(output: tuple[Path, int] | None) -> str | None:
    """Returns what a library has printed as it ended the process; None where that is in no file. output: as of
    RankExits.output_of."""
    if output is None:
        return None
    path, before = output
    with suppress(OSError), open_regular(path) as file:
        file.seek(max(before, path.stat().st_size - MOST_BYTES))
        said = LAST_WORDS.search(file.read(MOST_BYTES).decode(errors="replace"))
        return printable(said[1], LONGEST) if said else None
    return None
