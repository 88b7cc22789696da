"""Ranks that connect and all-reduce: whether they can, with which settings, and which of them is slow.

The environment is tried as it is. Where that fails, settings of GLOO_* or NCCL_* are tried one after the other, and the
first that works is printed.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from samestep.world.checks import Finding, LaunchInfo, ok
from samestep.world.machine import Machine, RankTried, Trial

GROUP = "network"
STARTS_RANKS = True
SLOWER = 2.0  # than the median: a straggler
FIRST_WAIT_S, WAIT_S = 20.0, 10.0
MOST_TRIES = 6
SWITCHES = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


@dataclass(frozen=True)
class Try:
    """One attempt of the ranks to connect and to all-reduce.

    variables: those that were set for it. ranks: what each saw.
    """

    variables: Mapping[str, str]
    ranks: tuple[RankTried, ...]

    @property
    def error(self) -> str:
        """The error of the first rank that has one, a lost connection last; '' where all succeeded."""
        errors = sorted((_is_echo(rank.error), rank.rank, rank.error) for rank in self.ranks if rank.error)
        return f"rank {errors[0][1]}: {errors[0][2]}" if errors else ""


@dataclass(frozen=True)
class Facts:
    """The attempts of the ranks on all machines.

    tries: the environment as it is, then others until one has worked. places: rank -> its machine's name. set_here: the
    variables of gloo and NCCL that are set.
    """

    tries: tuple[Try, ...]
    places: Mapping[int, str] = field(default_factory=dict)
    set_here: Mapping[str, str] = field(default_factory=dict)


def measure(machines: Sequence[Machine], info: LaunchInfo) -> Facts:
    places: dict[int, str] = {}
    for machine in machines:
        for _ in range(machine.nproc):
            places[len(places)] = machine.name
    tries = [_tried(machines, info, {}, FIRST_WAIT_S)]
    if tries[0].error:
        backend = next((rank.backend for rank in tries[0].ranks if rank.backend), "gloo")
        shared = [set(machine.interfaces()) for machine in machines]
        names = [name for name in machines[0].interfaces() if all(name in each for each in shared)]
        for variables in candidates(names, backend, len(machines))[:MOST_TRIES]:
            tries.append(_tried(machines, info, variables, WAIT_S))
            if not tries[-1].error:
                break
    chosen = {name: value for name, value in os.environ.items() if name.startswith(("GLOO_", "NCCL_"))}
    return Facts(tuple(tries), places, chosen)


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
    """Whether another machine may ask for these variables: those that `candidates` has, with an interface of here."""
    of_interfaces = {"GLOO_SOCKET_IFNAME": interfaces, "NCCL_SOCKET_IFNAME": [f"={name}" for name in interfaces]}
    known = {**of_interfaces, **dict.fromkeys(SWITCHES, ("1",))}
    return all(value in known.get(name, ()) for name, value in variables.items())


def _tried(machines: Sequence[Machine], info: LaunchInfo, variables: Mapping[str, str], wait_s: float) -> Try:
    size, first = sum(machine.nproc for machine in machines), 0
    port = machines[0].free_port()
    for machine in machines:
        machine.start(Trial(machines[0].address, port, size, machine.nproc, first, variables, info.device, wait_s))
        first += machine.nproc
    return Try(variables, tuple(rank for machine in machines for rank in machine.ended()))


def _is_echo(error: str) -> bool:
    """Whether an error only says that another rank has ended."""
    return any(word in error for word in ("onnection closed", "onnection reset", "roken pipe", "no answer"))


def judge(seen: Facts) -> list[Finding]:
    first, last = seen.tries[0], seen.tries[-1]
    if last.error:
        tried = "; ".join(
            " ".join(f"{name}={value}" for name, value in each.variables.items()) for each in seen.tries[1:]
        )
        also = f"; nor can they with {tried}" if tried else ""
        more = "# the same samestep doctor then shows more"
        fix = f"export TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_CPP_LOG_LEVEL=INFO   {more}"
        return [Finding("FAIL", f"the ranks cannot connect and all-reduce: {first.error}{also}", fix)]
    findings = _settings(first, last, seen.set_here) if first.error else []
    return findings + _stragglers(last, seen.places) or ok(_shown(last))


def _settings(first: Try, last: Try, set_here: Mapping[str, str]) -> list[Finding]:
    """Says which settings work, where the environment as it is does not."""
    working = " ".join(f"{name}={value}" for name, value in last.variables.items())
    export = f"export {working}"
    given = [f"{name}={set_here[name]}" for name in last.variables if name in set_here]
    only_interface = set(last.variables) <= {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    if given or not only_interface:
        here = " ".join(given) or "this environment"
        said = f"the ranks cannot connect and all-reduce with {here} ({first.error}), and can with {working}"
        return [Finding("FAIL", said, export)]
    said = f"the ranks connect on another interface than gloo or NCCL chooses here ({first.error})"
    return [Finding("WARN", f"{said}; samestep run sets this itself, a script under torchrun does not", export)]


def _stragglers(tried: Try, places: Mapping[int, str]) -> list[Finding]:
    """Names the ranks that take much longer for the same products than the others."""
    times = {rank.rank: rank.matmul_s for rank in tried.ranks if rank.matmul_s}
    if len(times) < 2:
        return []
    findings = []
    for rank, seconds in times.items():
        usual = statistics.median(times[other] for other in times if other != rank)
        if seconds > SLOWER * usual:
            findings.append(
                Finding(
                    "WARN",
                    f"rank {rank} is a straggler: the same products take {1000 * seconds:.0f} ms there and "
                    f"{1000 * usual:.0f} ms on the others, and every step waits for it",
                    "top -H   # there: what else runs? Then its limit of CPU time, its affinity (taskset -p)",
                    places.get(rank, ""),
                )
            )
    return findings


def _shown(tried: Try) -> str:
    slowest = max(rank.all_reduce_s for rank in tried.ranks)
    backend = tried.ranks[0].backend or "gloo"
    return f"{len(tried.ranks)} ranks connect over {backend}; an all-reduce of 4 MiB takes {1000 * slowest:.1f} ms"
