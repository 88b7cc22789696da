"""Whether each machine of the launch has come, once, and was given the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.world.checks import Finding, LaunchInfo, different, fail, ok, warn

GROUP = "launch"


@dataclass(frozen=True)
class Facts:
    """node: the --node-rank of this machine; None where none was given."""

    node: int | None
    nnodes: int
    nproc: int
    master: str
    started_by: str


def probe(info: LaunchInfo) -> Facts:
    return Facts(info.node, info.nnodes, info.nproc, info.master, info.started_by)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    found: list[Finding] = []
    first = next(iter(facts.values()))
    if says := different(facts, lambda seen: str(seen.nnodes)):
        found += fail(
            f"--nnodes is not the same on all machines ({says}): they would wait for ever", "# the same line on each"
        )
    if says := different(facts, lambda seen: str(seen.nproc)):
        found += warn(f"the machines have different numbers of ranks ({says})", f"--nproc {first.nproc}   # on each")
    numbers: dict[int, list[str]] = {}
    for name, seen in facts.items():
        if seen.node is not None:
            numbers.setdefault(seen.node, []).append(name)
    for number, names in numbers.items():
        if len(names) > 1:
            found += fail(
                f"{' and '.join(names)} both have --node-rank {number}: one of them will be refused",
                f"--node-rank {_free(numbers, first.nnodes)}   # on {names[-1]}",
            )
    if len(facts) < first.nnodes and not any(each.status == "FAIL" for each in found):
        absent = [str(number) for number in range(first.nnodes) if number not in numbers] if numbers else []
        which = f" (--node-rank {', '.join(absent)} is missing)" if absent else ""
        found += fail(
            f"{len(facts)} of {first.nnodes} machines have come{which}: the others do not run this line, or cannot "
            "reach this machine",
            "# type the same line on each machine; there it says what is wrong",
        )
    return found or ok(f"{len(facts)} of {first.nnodes} machines, ranks on each: {first.nproc}")


def _free(numbers: Mapping[int, list[str]], nnodes: int) -> int:
    return next((number for number in range(nnodes) if number not in numbers), nnodes)
