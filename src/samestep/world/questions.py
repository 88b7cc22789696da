"""Questions to a rank that trains: one thread of its own process answers them, and leaves nothing else there.

    serve(folder, rank, {COLLECTIVES: read})   in the rank, once it opens a process group
    ask(folder, rank, COLLECTIVES)             in the command: bytes, or None where nobody answers

A question is one byte in a named pipe, its answer a file beside it; both lie in a folder that no other user may enter.
A pipe has no peer that a forked child could hang up on. The thread is none of threading's: a script that joins all
threads does not wait for it, and no signal is delivered to it. It has ended before the interpreter does, and is never
begun where the process's limits leave little room: the last thread or file is the training's own.
"""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from samestep.errors import UserError
from samestep.world.connections import make_private
from samestep.world.regular_files import move_file, open_new, read_regular, remove_file

COLLECTIVES, STACKS = b"c", b"s"
END = b"e"
FOLDER = "questions"  # in the folder of a launch, for this user alone
ANSWER_S = 2.0  # for an answer: a thread of the rank may hold the interpreter's lock for ever
END_S = 1.0  # for the thread to end, at the end of the process
POLL_S = 0.002
MOST_BYTES = 1 << 26  # of an answer
SPARE = 256  # threads, and half as many files, that must be left to the training


def serve(folder: Path, rank: int, answers: Mapping[bytes, Callable[[], bytes]]) -> None:
    """Answers the questions to this rank, until the process ends. answers: question -> what returns its answer; that
    for the stacks is known here.

    Does nothing where it already does, where the limits of the process leave little room, or where `folder` is on no
    disk of this machine. What the functions raise ends the answering, and nothing else.
    """
    if _Serving.current or not has_room():
        return
    with suppress(OSError, RuntimeError, UserError):  # RuntimeError: no thread can be started
        _Serving.current = _Serving(folder, rank, {STACKS: own_stacks, **answers})


class _Serving:
    """The thread that answers, of the one rank that this process is."""

    current: _Serving | None = None
    is_prepared = False  # whether this process and those that it forks are

    def __init__(self, folder: Path, rank: int, answers: Mapping[bytes, Callable[[], bytes]]) -> None:
        self._pipe = pipe = _pipe(folder, rank)
        make_private(pipe.parent)
        remove_file(pipe)
        os.mkfifo(pipe, 0o600)
        # The pipe is opened for writing, too: opening does not wait, and reading never meets the end.
        self._descriptor = os.open(pipe, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._inode = os.fstat(self._descriptor).st_ino
        self._answers = answers
        self._files = {question: _answer(folder, rank, question) for question in answers}
        self._runs = _thread.allocate_lock()
        self._runs.acquire()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            _thread.start_new_thread(self._run, ())  # with this thread's mask: signals are for the script's threads
        except RuntimeError:
            os.close(self._descriptor)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not _Serving.is_prepared:
            _Serving.is_prepared = True
            os.register_at_fork(after_in_child=_leave)
            atexit.register(end)

    def _run(self) -> None:
        # Nothing may be thrown, or logged, in a process that is not ours.
        with suppress(Exception):
            while self._is_open() and END not in (asked := os.read(self._descriptor, 64)) and self._is_open():
                for question, answer in self._answers.items():
                    if question in asked:
                        self._write(self._files[question], answer())
        self._runs.release()

    def _write(self, path: Path, content: bytes) -> None:
        new = path.with_name(f"{path.name}.new")
        with open_new(new, mode=0o600) as file:
            file.write(content)
        move_file(new, path)

    def _is_open(self) -> bool:
        """Whether the descriptor is the pipe still: a script that closes all may have opened a file of its own."""
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return False
        return stat.S_ISFIFO(status.st_mode) and status.st_ino == self._inode

    def close(self) -> None:
        """Closes this process's copy of the pipe."""
        if self._is_open():
            os.close(self._descriptor)

    def end(self) -> None:
        """Ends the thread, waits for it, and removes the pipe and the answers. A thread that the interpreter's end
        meets in C++ would abort the process; a pipe that stays cannot be copied with the folder."""
        if self._is_open():
            os.write(self._descriptor, END)
            self._runs.acquire(timeout=END_S)
        self.close()
        for path in (self._pipe, *self._files.values()):
            remove_file(path)


def own_stacks() -> bytes:
    """Returns the stacks of this process's threads, as faulthandler writes them."""
    descriptor = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        return os.pread(descriptor, MOST_BYTES, 0)
    finally:
        os.close(descriptor)


def _leave() -> None:
    """In a forked process, which has the pipe and not the thread."""
    if serving := _Serving.current:
        _Serving.current = None
        with suppress(OSError):
            serving.close()


def end() -> None:
    """Answers no more, where this process did. Called at the end of the process, too."""
    if serving := _Serving.current:
        _Serving.current = None
        with suppress(OSError):
            serving.end()


def ask(folder: Path, rank: int, question: bytes, timeout_s: float = ANSWER_S) -> bytes | None:
    """Asks a rank of this machine, and returns its answer.

    None where it does not answer in time: it does not serve, has ended, is stopped, or holds the interpreter's lock.
    """
    answer = _answer(folder, rank, question)
    try:
        remove_file(answer)
        # Opening fails at once where nobody reads.
        descriptor = os.open(_pipe(folder, rank), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                return None
            os.write(descriptor, question)
        finally:
            os.close(descriptor)
        until = time.monotonic() + timeout_s
        while not answer.exists():
            if time.monotonic() > until:
                return None
            time.sleep(POLL_S)
        return read_regular(answer, MOST_BYTES)
    except OSError:
        return None


def has_room() -> bool:
    """Whether a thread and a file more leave this process what its training may need.

    False under any limit on memory addresses: a thread's stack and heap take 70 MB of these, and use nearly none.
    """
    if any(_limit(kind) is not None for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)):
        return False
    try:
        files = _limit(resource.RLIMIT_NOFILE)
        if files is not None and files - len(os.listdir("/proc/self/fd")) < SPARE // 2:
            return False
        return all(limit - used() >= SPARE for limit, used in _thread_limits())
    except OSError:  # no /proc: not Linux
        return False


def _thread_limits() -> list[tuple[int, Callable[[], int]]]:
    """Returns each limit on threads, with what counts those that exist."""
    limits: list[tuple[int, Callable[[], int]]] = []
    processes = _limit(resource.RLIMIT_NPROC)
    if processes is not None and os.getuid():  # root's are not limited
        limits.append((processes, _own_threads))
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"):
        with suppress(OSError, ValueError):  # "max": none
            most = int(read_regular(Path(folder, "pids.max")))
            current = int(read_regular(Path(folder, "pids.current")))
            limits.append((most, lambda current=current: current))  # type: ignore[misc]
    return limits


def _own_threads() -> int:
    """Returns how many threads the processes of this user have."""
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it has ended
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += os.stat(f"/proc/{name}/task").st_nlink - 2
    return count


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _pipe(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank{rank}"


def _answer(folder: Path, rank: int, question: bytes) -> Path:
    return folder / FOLDER / f"rank{rank}-{question.decode()}"
