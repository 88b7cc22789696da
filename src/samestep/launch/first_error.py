"""Finds why a launch failed: reports the error of the first failing rank, not the launcher's."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from samestep import launch
from samestep.errors import Refused, TrainingFailed, UserError, message_in
from samestep.launch import Machines, oom_kills, stacks
from samestep.message import message
from samestep.records.record import Record

GLOO_MISMATCH = "distributed collective mismatch"  # what gloo prints before it aborts


def raise_if_failed(
    record: Record, code: int, size: int, machines: Machines, memory_kills: int, launchers: Sequence[str]
) -> None:
    """Raises UserError or TrainingFailed with the first cause, unless all `size` ranks have written their records.

    A lost peer is never the first cause: another rank ended before. memory_kills: how many processes the kernel's
    out-of-memory killer ended during the launch. launchers: as those of Command.
    """
    if record.complete(size):
        return
    error = record.error()
    log = "\n".join(log.read_text(errors="replace") for log in record.folder.glob("log*.txt"))
    killed = killed_rank(log, launchers)
    if error and error.kind in ("user", "refused"):
        raise (Refused if error.kind == "refused" else UserError)(error.message)
    if error and not error.lost_peer:
        log_file = _rank_log(record, error.rank)
        raise TrainingFailed(message("rank_failed", rank=error.rank, why=error.message, log=log_file))
    if killed:
        rank, name = killed
        raise TrainingFailed(
            f"rank {rank} was ended by {name}{_kill_reason(name, memory_kills)}{_abort_reason(record, rank)}; "
            f"its last output is in {_rank_log(record, rank)}"
        )
    exited = exited_rank(log, launchers)
    if exited and not (record.folder / f"error-rank{exited[0]}.json").exists():
        rank, code = exited
        raise TrainingFailed(
            f"rank {rank} exited with code {code} before it had finished (os._exit in the job, or in a "
            f"library?); its last output is in {_rank_log(record, rank)}"
        )
    if error:
        doctor = doctor_line(size, machines, launchers)
        raise TrainingFailed(message("rank_lost_contact", why=error.message, doctor=doctor))
    if refused := re.search(r"^samestep\.errors\.UserError: (.+)$", log, re.MULTILINE):  # by rank/rendezvous.py
        raise UserError(message_in(refused[1]) or refused[1])
    if machines.nnodes > 1 and not list(record.folder.glob("pid-rank*")):
        where = f"{machines.endpoint} within {machines.timeout_s:.0f} s"
        raise TrainingFailed(
            f"the {machines.nnodes} machines did not all reach the rendezvous at {where}"
            f"{_last_line(record)}; "
            f"run the same command on each, and check that they can reach {machines.master}; "
            f"{doctor_line(size, machines, launchers)}"
        )
    how = f"was ended by {signal_name(-code)}" if code < 0 else f"exited with {code}"
    why = _kill_reason("SIGKILL", memory_kills) if memory_kills else ""
    raise TrainingFailed(
        f"the launcher {how}{why}{_last_line(record)} and {_ranks_without_record(record, size)} left no record; "
        f"its output is in {record.folder}/log*.txt"
    )


def doctor_line(size: int, machines: Machines, launchers: Sequence[str] = ()) -> str:
    """Returns the words that name the command that finds out why ranks do not meet, or lose each other."""
    words = ["samestep doctor"]
    if machines.nnodes > 1 and not machines.single_launch:
        words += [f"--nnodes {machines.nnodes} --nproc {size} --master-addr {machines.master} --port {machines.port}"]
        words += ["--node-rank N"] if machines.node_rank is not None else []
    elif machines.nnodes > 1:
        words += [f"--launcher {launchers[0]}"] if launchers else []
        words += [f"--nproc {size // machines.nnodes}"]
        words += [f"--hosts {','.join(machines.hosts)} --port {machines.port}"] if machines.hosts else []
    else:
        words += [f"--nproc {size}"] if size > 1 else []
        words += [f"--port {machines.port}"] if machines.port else []
    where = " on each machine" if machines.nnodes > 1 and not machines.single_launch else ""
    return f"to find out why, type{where}: {' '.join(words)}"


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


def _last_line(record: Record) -> str:
    """Returns the last line of the launcher's log, often its reason, as in srun's 'More processors requested …'."""
    logs = record.folder.glob("log*.txt")
    lines = [
        line.strip() for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip(" -*=")
    ]
    return f" ({lines[-1][:200]})" if lines else ""


def _ranks_without_record(record: Record, size: int) -> str:
    """Names the ranks that have written no record, among those that started on this machine."""
    written = record.written()
    started = {int(path.name.removeprefix("pid-rank")) for path in record.folder.glob("pid-rank*")}
    missing = sorted((started or set(range(size))) - written)
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"


def _abort_reason(record: Record, rank: int) -> str:
    """Says why gloo has ended a rank, which it does when another one sends it data of another size."""
    log, stack = _rank_log(record, rank), record.folder / f"stack-rank{rank}.txt"
    if not log.is_file() or GLOO_MISMATCH not in log.read_text(errors="replace"):
        return ""
    text = stack.read_text(errors="replace") if stack.is_file() else ""
    frame = next(filter(None, map(stacks.users_frame, stacks.parse(text))), None)
    where = f" at {frame}" if frame else ""
    return (
        f"{where}: it received data of another size than its collective expects, so another rank calls another "
        "collective, or the same one with a tensor of another shape"
    )


def _kill_reason(name: str, memory_kills: int) -> str:
    if name != "SIGKILL":
        return ""
    if not memory_kills:
        return " (by a user or a scheduler: the kernel has counted no out-of-memory kill in this control group)"
    limit = oom_kills.limit_bytes()
    where = f", whose limit is {limit / 2**20:.0f} MiB" if limit else ""
    return (
        f": the kernel killed {memory_kills} process{'es' if memory_kills > 1 else ''} for memory in this control group"
        f"{where}; use fewer ranks or loader workers, a smaller micro_batch, or ask the scheduler for more memory"
    )
