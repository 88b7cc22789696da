"""Finds why a launch failed: reports the error of the first failing rank, not the launcher's."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from samestep import launch
from samestep.errors import ObservationFailed, Refused, TrainingFailed, UserError, message_in
from samestep.launch import Machines, stacks
from samestep.message import Message, message
from samestep.records.record import FAULT, Record
from samestep.world import resources
from samestep.world.regular_files import paths_in

GLOO_MISMATCH = "distributed collective mismatch"  # what gloo prints before it aborts


def raise_if_failed(
    record: Record, code: int, size: int, *, machines: Machines, killed_for_memory: int, launchers: Sequence[str]
) -> None:
    """Raises UserError or TrainingFailed with the first cause, unless all `size` ranks have written their records.

    A lost peer is never the first cause: another rank ended before. killed_for_memory: how many processes the kernel's
    out-of-memory killer ended during the launch. launchers: as those of Command.
    """
    if record.complete(size):
        return
    error = record.error()
    log = "\n".join(log.read_text(errors="replace") for log in paths_in(record.folder, "log*.txt") if log.is_file())
    killed = killed_rank(log, launchers)
    if error and error.kind in ("user", "refused"):
        raise (Refused if error.kind == "refused" else UserError)(error.message)
    if error and error.message.id == FAULT:
        raise ObservationFailed(error.message)
    if error and not error.lost_peer:
        log_file = _rank_log(record, error.rank)
        raise TrainingFailed(message("rank_failed", rank=error.rank, why=error.message, log=log_file))
    if killed:
        raise TrainingFailed(_why_killed(record, *killed, killed_for_memory))
    exited = exited_rank(log, launchers)
    if exited and not (record.folder / f"error-rank{exited[0]}.json").exists():
        rank, code = exited
        raise TrainingFailed(message("rank_exited_before_its_end", rank=rank, code=code, log=_rank_log(record, rank)))
    doctor = doctor_line(size, machines, launchers)
    if error:
        raise TrainingFailed(message("rank_lost_contact", why=error.message, doctor=doctor))
    if refused := re.search(r"^samestep\.errors\.UserError: (.+)$", log, re.MULTILINE):  # by rank/rendezvous.py
        raise UserError(message_in(refused[1]) or refused[1])
    last_line, folder = _last_line(record), record.folder
    if machines.nnodes > 1 and not paths_in(folder, "pid-rank*"):
        raise TrainingFailed(
            message(
                "machines_did_not_all_reach_the_rendezvous",
                machines=machines.nnodes,
                endpoint=machines.endpoint,
                timeout_s=machines.timeout_s,
                last_line=last_line,
                master=machines.master,
                doctor=doctor,
            )
        )
    raise TrainingFailed(
        message(
            "launcher_left_ranks_without_a_record",
            signal=signal_name(-code) if code < 0 else None,
            code=code if code >= 0 else None,
            why=memory_limit_reached(killed_for_memory) if killed_for_memory else None,
            last_line=last_line,
            ranks=_ranks_without_record(record, size),
            folder=folder,
        )
    )


def doctor_line(size: int, machines: Machines, launchers: Sequence[str] = ()) -> Message:
    """Returns the command that finds out why ranks do not meet, or lose each other."""
    words = ["samestep doctor"]
    on_each = machines.nnodes > 1 and not machines.single_launch
    if on_each:
        words += [f"--nnodes {machines.nnodes} --nproc {size} --master-addr {machines.master} --port {machines.port}"]
        words += ["--node-rank N"] if machines.node_rank is not None else []
    elif machines.nnodes > 1:
        words += [f"--launcher {launchers[0]}"] if launchers else []
        words += [f"--nproc {size // machines.nnodes}"]
        words += [f"--hosts {','.join(machines.hosts)} --port {machines.port}"] if machines.hosts else []
    else:
        words += [f"--nproc {size}"] if size > 1 else []
        words += [f"--port {machines.port}"] if machines.port else []
    command = " ".join(words)
    if on_each:
        return message("run_the_doctor_on_each_machine", command=command)
    return message("run_the_doctor", command=command)


def killed_rank(log: str, launchers: Sequence[str]) -> tuple[int, str] | None:
    """Returns (rank, signal) of a rank that a signal ended, by the launchers' log; not SIGTERM, the launcher's own."""
    for report in (launch.load(name).report for name in launchers):
        for match in (match for pattern in report.killed for match in re.finditer(pattern, log)):
            groups = match.groupdict()
            number = int(groups["status"]) - 128 if "status" in groups else int(groups.get("number") or 0)
            name = signal_name(number or report.signals[groups["word"]])
            if name != "SIGTERM":
                return int(groups["rank"]), name
    return None


def signal_name(number: int) -> str:
    """Returns 'SIGKILL', or 'signal 40' for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exited_rank(log: str, launchers: Sequence[str]) -> tuple[int, int] | None:
    """Returns (rank, exit code) of a rank that exited, by the launchers' log."""
    matches = (re.search(pattern, log) for name in launchers for pattern in launch.load(name).report.exited)
    first = next((match for match in matches if match), None)
    return (int(first["rank"]), int(first["code"])) if first else None


def _rank_log(record: Record, rank: int) -> Path:
    path = record.folder / f"rank{rank}.log"
    return path if path.exists() else record.folder


def _last_line(record: Record) -> str | None:
    """Returns the last line of the launcher's log, often its reason, as in srun's 'More processors requested …'."""
    logs = filter(Path.is_file, paths_in(record.folder, "log*.txt"))
    lines = [
        line.strip() for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip(" -*=")
    ]
    return lines[-1][:200] if lines else None


def _ranks_without_record(record: Record, size: int) -> list[int]:
    """Lists the ranks that have written no record, among those that started on this machine."""
    started = {int(path.name.removeprefix("pid-rank")) for path in paths_in(record.folder, "pid-rank*")}
    return sorted((started or set(range(size))) - record.written())


def _why_killed(record: Record, rank: int, name: str, killed_for_memory: int) -> Message:
    """Returns why a signal has ended a rank. name: of the signal."""
    log, stack = _rank_log(record, rank), record.folder / f"stack-rank{rank}.txt"
    if log.is_file() and GLOO_MISMATCH in log.read_text(errors="replace"):
        text = stack.read_text(errors="replace") if stack.is_file() else ""
        frame = next(filter(None, map(stacks.users_frame, stacks.parse(text))), None)
        return message(
            "rank_received_data_of_another_size", rank=rank, signal=name, frame=frame and str(frame), log=log
        )
    if name != "SIGKILL":
        return message("rank_ended_by_signal", rank=rank, signal=name, log=log)
    if killed_for_memory:
        return message("rank_killed_for_memory", rank=rank, why=memory_limit_reached(killed_for_memory), log=log)
    return message("rank_killed_by_somebody", rank=rank, log=log)


def memory_limit_reached(processes: int) -> Message:
    limit = resources.memory_limit(around=False)
    limit_mib = round(limit / 2**20) if limit else None
    return message("killed_for_memory", processes=processes, limit_mib=limit_mib)


def memory_kills() -> int:
    """Counts the processes that the kernel's out-of-memory killer has ended so far in this process's control group or,
    where it has none, on this machine.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), cgroup-v1/memory.html (oom_control)
    """
    counts = [
        _count(path) for path in resources.cgroup_files("memory", "memory.events", "memory.oom_control", around=False)
    ]
    known = [count for count in counts if count is not None]
    return known[0] if known else _count(Path("/proc/vmstat")) or 0


def _count(path: Path) -> int | None:
    with suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        return int(match[1]) if match else None
    return None
