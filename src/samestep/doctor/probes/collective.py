"""The probe of a process group: whether ranks connect and all-reduce, with which settings, and which rank is slow.

The environment is tried as it is. Where that fails, settings of GLOO_* or NCCL_* are tried one after the other, and the
first that works is printed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from samestep.doctor.machine import LaunchInfo, Machine, Trial, TrialRecord
from samestep.doctor.probe import Finding, FleetProbe, fail, ok, quoted, warn
from samestep.message import Message, message

SLOWER = 2.0  # than the median: a straggler
FIRST_WAIT_S, WAIT_S = 20.0, 10.0
MOST_TRIES = 6
SWITCHES = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


@dataclass(frozen=True)
class Attempt:
    """One attempt of the ranks to connect and to all-reduce.

    variables: those that were set for it. ranks: what each measured.
    """

    variables: Mapping[str, str]
    ranks: tuple[TrialRecord, ...]

    @property
    def failed(self) -> TrialRecord | None:
        """The first rank that has failed, one with a lost connection last; None where all succeeded."""
        failed = [rank for rank in self.ranks if rank.failed]
        return min(failed, key=lambda rank: (_is_echo(rank.error), rank.rank), default=None)

    @property
    def settings(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.variables.items())


@dataclass(frozen=True)
class Attempts:
    """The attempts of the ranks on all machines.

    attempts: the environment as it is, then others until one has worked. places: rank -> its machine's name.
    environment: the variables of gloo and NCCL that are set.
    """

    attempts: tuple[Attempt, ...]
    places: Mapping[int, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def try_collective(machines: Sequence[Machine], info: LaunchInfo) -> Attempts:
    places: dict[int, str] = {}
    for machine in machines:
        for _ in range(machine.nproc):
            places[len(places)] = machine.name
    attempts = [_try(machines, info, {}, FIRST_WAIT_S)]
    if attempts[0].failed:
        backend = next((rank.backend for rank in attempts[0].ranks if rank.backend), "gloo")
        available = [set(machine.interfaces()) for machine in machines]
        shared = [name for name in machines[0].interfaces() if all(name in names for names in available)]
        for variables in candidates(shared, backend, len(machines))[:MOST_TRIES]:
            attempts.append(_try(machines, info, variables, WAIT_S))
            if not attempts[-1].failed:
                break
    environment = {name: value for name, value in os.environ.items() if name.startswith(("GLOO_", "NCCL_"))}
    return Attempts(tuple(attempts), places, environment)


def candidates(interfaces: Sequence[str], backend: str, machines: int) -> list[dict[str, str]]:
    """Returns the settings to try, the likeliest first. interfaces: that all machines have, the route's first."""
    useful = [name for name in interfaces if machines == 1 or name != "lo"]
    by_interface = [{"GLOO_SOCKET_IFNAME": name} for name in useful]
    if backend != "nccl":
        return by_interface
    settings = [{"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} for name in useful[:2]]
    settings += [{name: "1"} for name in SWITCHES]
    return [*settings, {**dict.fromkeys(SWITCHES, "1"), **(settings[0] if useful else {})}]


def may_be_set(variables: Mapping[str, str], interfaces: Collection[str]) -> bool:
    """Whether another machine may ask for these variables: those that `candidates` has, with an interface that is
    here."""
    by_interface = {"GLOO_SOCKET_IFNAME": interfaces, "NCCL_SOCKET_IFNAME": [f"={name}" for name in interfaces]}
    known = {**by_interface, **dict.fromkeys(SWITCHES, ("1",))}
    return all(value in known.get(name, ()) for name, value in variables.items())


def _try(machines: Sequence[Machine], info: LaunchInfo, variables: Mapping[str, str], wait_s: float) -> Attempt:
    first_rank, port = 0, machines[0].free_port()
    for machine in machines:
        machine.start(
            Trial(
                master=machines[0].address,
                port=port,
                size=sum(machine.nproc for machine in machines),
                local_size=machine.nproc,
                first_rank=first_rank,
                variables=variables,
                device=info.device,
                wait_s=wait_s,
            )
        )
        first_rank += machine.nproc
    return Attempt(variables, tuple(rank for machine in machines for rank in machine.ended()))


def _is_echo(error: str) -> bool:
    """Whether an error only says that another rank has ended."""
    return any(word in error for word in ("onnection closed", "onnection reset", "roken pipe", "no answer"))


def judge_collective(facts: Attempts) -> list[Finding]:
    first, last = facts.attempts[0], facts.attempts[-1]
    if last.failed:
        tried = [attempt.settings for attempt in facts.attempts[1:]]
        more = "# the same samestep doctor then shows more"
        fix = f"export TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_CPP_LOG_LEVEL=INFO   {more}"
        return fail(message("ranks_do_not_all_reduce", error=_error(first.failed or last.failed), tried=tried), fix)
    findings = _judge_settings(first.failed, last, facts.environment) if first.failed else []
    findings += _judge_stragglers(last, facts.places)
    slowest = 1000 * max(rank.all_reduce_s for rank in last.ranks)
    backend = last.ranks[0].backend or "gloo"
    return findings or ok(message("ranks_all_reduce", ranks=len(last.ranks), backend=backend, milliseconds=slowest))


def _error(rank: TrialRecord) -> Message:
    if rank.exit_code is None:
        return message("rank_raised", rank=rank.rank, error=rank.error)
    if rank.exit_code < 0:
        return message("rank_process_was_killed", rank=rank.rank, signal=-rank.exit_code, line=rank.error)
    return message("rank_process_exited", rank=rank.rank, code=rank.exit_code, line=rank.error)


def _judge_settings(failed: TrialRecord, working: Attempt, environment: Mapping[str, str]) -> list[Finding]:
    """Says which settings work, where the environment as it is does not."""
    export = f"export {' '.join(f'{quoted(name)}={quoted(value)}' for name, value in working.variables.items())}"
    chosen = [f"{name}={environment[name]}" for name in working.variables if name in environment]
    error = _error(failed)
    if chosen or not set(working.variables) <= INTERFACES:
        why = message("ranks_all_reduce_with_other_settings", chosen=chosen, error=error, working=working.settings)
        return fail(why, export)
    return warn(message("ranks_connect_on_another_interface", error=error, working=working.settings), export)


def _judge_stragglers(attempt: Attempt, places: Mapping[int, str]) -> list[Finding]:
    """Names the ranks that take much longer for the same products than the others."""
    times = {rank.rank: rank.matmul_s for rank in attempt.ranks if rank.matmul_s}
    if len(times) < 2:
        return []
    findings = list[Finding]()
    for rank, seconds in times.items():
        usual = statistics.median(times[peer] for peer in times if peer != rank)
        if seconds > SLOWER * usual:
            why = message(
                "rank_is_a_straggler", rank=rank, milliseconds=1000 * seconds, usual_milliseconds=1000 * usual
            )
            fix = "top -H   # there: what else runs? Then its limit of CPU time, its affinity (taskset -p)"
            findings += warn(why, fix, machine=places.get(rank, ""))
    return findings


PROBES = (
    FleetProbe(
        name="collective",
        group="network",
        facts=Attempts,
        gather=try_collective,
        judge=judge_collective,
        needs_torch=True,
    ),
)
