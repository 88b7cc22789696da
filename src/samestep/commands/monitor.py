"""monitor: runs any command, and samples what its process tree and the machine use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import psutil
from rich.text import Text

from samestep.commands.command_options import MonitorOptions
from samestep.commands.exit_codes import ignored_at_start
from samestep.commands.results_folder import dated_folder
from samestep.errors import UserError, say
from samestep.launch.monitor_sampler import MonitorSampler
from samestep.launch.monitored_ranks import MonitoredRanks
from samestep.launch.rank_meter import RankMeter
from samestep.message import message
from samestep.records.files import replace_text
from samestep.records.launch_files import OF_MONITORED
from samestep.records.monitor import CSV, PAGE, SUMMARY, RankUse
from samestep.records.redaction import redacted
from samestep.report import monitor_text
from samestep.report.figures.rank_findings import extra_contexts, findings, unexplained
from samestep.report.terminal import Terminal
from samestep.world import become_worker, nvidia
from samestep.world.connections import make_private
from samestep.world.processes import COMMAND, dismiss, end_children, guard, left_running, this_command
from samestep.world.regular_files import check_place, fresh_folder, make_named_folder, open_new, paths_in, remove_file
from samestep.world.resources import adopt_orphans, reap_orphans

if TYPE_CHECKING:
    from typing_extensions import Self


FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # of these: they ask the command to end
WAITED = (*FORWARDED, signal.SIGCHLD)
TELL_S = 60.0  # seconds from one search for a fault of the ranks to the next
END_S = 5.0  # seconds in which a command may end after SIGTERM
LONGEST_S = 3600.0  # that the kernel is asked to wait; it refuses an endless time
SI_USER = 0  # the greatest code of a signal that a process has sent; the terminal's have SI_KERNEL


def monitor(options: MonitorOptions, words: Sequence[str]) -> int:
    """Runs a command to its end. Returns its exit code, or 128 + the signal that has ended it.

    usage.csv, usage.json and usage.html are in the folder then. No process that the command has started is left. Raises
    UserError for a command that cannot be started, and a folder that cannot be used.
    """
    if shutil.which(words[0]) is None:
        raise UserError(
            f"there is no command {words[0]!r} that can be executed; check its spelling, its path and its permissions"
        )
    folder = _folder(options.out, words)
    adopt_orphans()
    meter = RankMeter(folder / RANKS)
    ranks = MonitoredRanks(folder / RANKS, options.stall_s, ends_hung=options.end_hung)
    guarding = guard(this_command())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
    try:
        sampler = MonitorSampler(folder, options.interval, without=guarding[:1])
        environment = monitored(folder / RANKS) | ({become_worker.AS_CPU: "1"} if options.as_cpu else {})
        process = _start(words, before, environment)
        with LiveLine() as line:
            hung = _watch(process, sampler, ranks, meter, line, options.end_hung)
        left = sum(process.pid != guarding[0] for process in left_running())
    except UserError:
        remove_file(folder / CSV)
        raise
    finally:
        dismiss(*guarding)
        end_children()
        while signal.sigtimedwait(FORWARDED, 0):  # Ctrl-C, which the command has got too, may still wait here
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if left:
        say(message("processes_of_the_command_ended", processes=left))
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    code = 1 if hung else code
    if code and not hung and (failure := ranks.first_failure()):
        say(failure)
    if not ranks.were_seen:
        say(message("no_rank_was_seen", attached=len(paths_in(folder / RANKS, ATTACHED))))
    _report(folder, sampler, words, code, meter.uses())
    return code


def _folder(out: Path | None, words: Sequence[str]) -> Path:
    folder = out or dated_folder(Path(words[0]).name)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder with --out")
    if os.path.lexists(folder / CSV):
        raise UserError(f"{folder / CSV} exists, and would be replaced; give another folder with --out")
    try:
        make_named_folder(folder)
        # The ranks of an earlier command have left files there.
        fresh_folder(folder, make_private(folder / RANKS), OF_MONITORED)
        for name in (SUMMARY, PAGE):
            check_place(folder / name)
        open_new(folder / CSV).close()
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"the folder {folder} is not writable ({error.strerror}); give another with --out") from None
    return folder


ATTACHED = "monitored-*"  # a file for each process that has imported torch
RANKS = "ranks"  # the folder in which the command's ranks write, in that of its files


def monitored(folder: Path) -> dict[str, str]:
    """Returns the variables by which the ranks of a command write into a folder what they do."""
    path = str(folder.absolute())
    # As many collectives as flight_recorder.ENTRIES: torch records them from the start of the process group.
    recorder = {"TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", "256")}
    return {become_worker.MONITOR: path} | recorder | become_worker.install(folder.absolute(), os.environ)


def _start(
    words: Sequence[str], mask: set[int | signal.Signals], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts the command as the shell would have: with this process's files, and the signals that it got."""

    def prepare() -> None:
        # A signal that each command of samestep handles.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN if number in ignored_at_start else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        return subprocess.Popen(
            list(words), env=os.environ | environment | {COMMAND: this_command()}, preexec_fn=prepare
        )
    except OSError as error:
        raise UserError(
            f"{words[0]} cannot be executed ({error.strerror}); a script needs a first line as in "
            "#!/bin/sh, or its interpreter before it"
        ) from None


def _watch(
    process: subprocess.Popen[bytes],
    sampler: MonitorSampler,
    ranks: MonitoredRanks,
    meter: RankMeter,
    line: LiveLine,
    end_hung: bool,
) -> bool:
    """Samples until the command has ended, and says what is wrong with its ranks. Returns whether it was ended because
    they hang. Signals that somebody sends to this process go to the command; those of the terminal, as Ctrl-C, the
    command has got itself."""
    previous = sampler.samples[-1]
    told, told_at = set[tuple[str, int]](), time.monotonic()
    late: int | None = None  # a rank that is slow for no reason that is counted
    while process.poll() is None:
        reap_orphans(process.pid)
        arrived = signal.sigtimedwait(WAITED, min(sampler.due_in(), ranks.due_in(), LONGEST_S))
        if arrived and arrived.si_signo in ENDING:
            ranks.stopped_at = min(ranks.stopped_at, time.time())
        is_sent = arrived and arrived.si_signo != signal.SIGCHLD and arrived.si_code <= SI_USER
        # A process of the command that sends a signal to its whole group has sent it to the command, too.
        if arrived and is_sent and not _is_of(process.pid, arrived.si_pid):
            with suppress(ProcessLookupError):
                process.send_signal(arrived.si_signo)
        for said in ranks.poll() if not ranks.due_in() else ():
            say(said)
        if not ranks.hang and meter.look_if_due(ranks.running):
            late = unexplained(meter.uses())
        if not ranks.hang and late is not None and late in ranks.running:
            meter.look_at_stacks(late)
        if time.monotonic() - told_at > TELL_S:
            told_at = time.monotonic()
            pids = {rank: pid for rank, (pid, _) in ranks.running.items()}
            extra = extra_contexts(pids, sampler.contexts())
            if extra and (extra.id, -1) not in told:
                say(extra)
                told.add((extra.id, -1))
            told |= _tell(meter.uses(), told)
        if end_hung and ranks.hang:
            say(message("hung_command_ended"))
            _end(process)
            return True
        if not sampler.due_in():
            sample = sampler.sample()
            line.show(monitor_text.live(sample, previous))
            previous = sample
    reap_orphans(process.pid)
    return False


def _is_of(pid: int, sender: int) -> bool:
    """Returns whether a process is another one, or has been started by it."""
    with suppress(psutil.Error):
        return sender == pid or any(parent.pid == pid for parent in psutil.Process(sender).parents())
    return False


def _tell(ranks: Sequence[RankUse], told: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    """Prints the faults of the ranks that have not been told yet. Returns those that it has told: id and rank."""
    said = set()
    for finding in findings(ranks, os.cpu_count() or 1, on_gpus=bool(nvidia.count())):
        key = finding.id, int(finding.fields.get("rank", -1))
        if key not in told:
            say(finding)
            said.add(key)
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the command as a user would have; after a while, by force. What it leaves running is ended later."""
    for end in (process.terminate, process.kill):
        if process.poll() is None:
            end()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


def _report(folder: Path, sampler: MonitorSampler, words: Sequence[str], code: int, ranks: list[RankUse]) -> None:
    """Writes usage.json and usage.html, and says what was used."""
    from samestep.report.monitor_page import monitor_page

    words = [os.fsencode(word).decode(errors="replace") for word in words]  # files of text take no other bytes
    summary = sampler.close(redacted(words), code, ranks)
    _tell(ranks, ())  # once more, over the whole training
    for sentence in monitor_text.sentences(summary):
        say(sentence)
    try:
        replace_text(folder / PAGE, monitor_page(summary, sampler.samples))
    except OSError as error:
        say(message("monitor_page_not_written", file=folder / PAGE, error=error.strerror))
        return
    say(message("monitor_files_written", samples=folder / CSV, page=folder / PAGE))


SAVE, RESTORE, CLEAR = "\x1b7", "\x1b8", "\x1b[2K"
LEAST_ROWS = 4


class LiveLine:
    """The last row of the terminal on stderr, shown while the block runs; nothing where stderr is no terminal.

    rich's own live display would need the command's output to pass through this process. Here the other rows are made
    the terminal's scrolling region, as apt does, and the command keeps the terminal.
    """

    def __init__(self) -> None:
        self._console = Terminal(stderr=True)
        self._rows = 0  # the size of the terminal, where the region is set

    def __enter__(self) -> Self:
        return self

    def show(self, line: Text) -> None:
        """Replaces the line."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        width, rows = self._console.size
        if rows < LEAST_ROWS:
            return
        begin = ""
        if rows != self._rows:  # the first time, or the window has another size
            # A line feed makes room where the cursor is in the last row.
            begin = f"\n{SAVE}\x1b[1;{rows - 1}r{RESTORE}\x1b[1A"
            self._rows = rows
        line.truncate(width - 1, overflow="ellipsis")
        with self._console.capture() as captured:
            self._console.print(line, end="", soft_wrap=True)
        self._write(f"{begin}{SAVE}\x1b[{rows};1H{CLEAR}{captured.get()}{RESTORE}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rows:
            self._write(f"{SAVE}\x1b[r\x1b[{self._rows};1H{CLEAR}{RESTORE}")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.flush()
        os.write(sys.stderr.fileno(), text.encode())  # in one piece, between two of the command's
