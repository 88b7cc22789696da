"""Whether each machine of the launch has connected, once, with the same --nnodes and --nproc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.world.checks import Finding, LaunchInfo, different, fail, ok, warn

GROUP = "launch"


@dataclass(frozen=True)
class Facts:
    """The options of the launch, as one machine was given them.

    node: the --node-rank of this machine; None where none was given.
    """

    node: int | None
    nnodes: int
    nproc: int
    master: str
    started_by: str


def probe(info: LaunchInfo) -> Facts:
    return Facts(info.node, info.nnodes, info.nproc, info.master, info.started_by)


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    findings: list[Finding] = []
    first = next(iter(facts.values()))
    if says := different(facts, lambda seen: str(seen.nnodes)):
        findings += fail(
            f"--nnodes is not the same on all machines ({says}): they would wait for ever", "# the same command on each"
        )
    if says := different(facts, lambda seen: str(seen.nproc)):
        findings += warn(f"the machines have different numbers of ranks ({says})", f"--nproc {first.nproc}   # on each")
    numbers: dict[int, list[str]] = {}
    for name, seen in facts.items():
        if seen.node is not None:
            numbers.setdefault(seen.node, []).append(name)
    for number, names in numbers.items():
        if len(names) > 1:
            findings += fail(
                f"{' and '.join(names)} both have --node-rank {number}: one of them will be refused",
                f"--node-rank {_free(numbers, first.nnodes)}   # on {names[-1]}",
            )
    if len(facts) < first.nnodes and not any(each.status == "FAIL" for each in findings):
        absent = [str(number) for number in range(first.nnodes) if number not in numbers] if numbers else []
        which = f" (--node-rank {', '.join(absent)} is missing)" if absent else ""
        findings += fail(
            f"{len(facts)} of {first.nnodes} machines have connected{which}: the others do not run this line, or "
            "cannot reach this machine",
            "# run the same command on each machine; there it says what is wrong",
        )
    return findings or ok(f"{len(facts)} of {first.nnodes} machines, ranks on each: {first.nproc}")


def _free(numbers: Mapping[int, list[str]], nnodes: int) -> int:
    return next((number for number in range(nnodes) if number not in numbers), nnodes)
