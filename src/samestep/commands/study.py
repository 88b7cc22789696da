"""Study: what to ask of a job, and the rows that come of it: one for each engine under each launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep import launch
from samestep.errors import UserError, first_few, nearest
from samestep.launch import Machines, fork_client
from samestep.proof.judge import Verdict
from samestep.records.record import Record


@dataclass(frozen=True)
class Study:
    """What to ask. rounds: launches of each engine that are measured; 0 only proves.

    nproc: ranks on each machine. steps: optimizer steps of each training of the proof. warmup_steps are run before
    measured_steps and left out.
    """

    job: str
    settings: Mapping[str, str]
    nproc: int
    engines: tuple[str, ...] = ()  # none: all
    launchers: tuple[str, ...] = ()  # none: each engine's first; 'all': all of them
    engine_settings: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    machines: Machines = Machines()  # noqa: RUF009 - frozen
    steps: int = 8
    rounds: int = 0
    warmup_steps: int = 20
    measured_steps: int = 100
    deadline_s: float | None = None

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.nproc * self.machines.nnodes


@dataclass
class Row:
    """One engine under one launcher: a row of the table."""

    engine: str
    launcher: str
    facts: Mapping[str, Any]
    verdict: Verdict
    launches: list[Record] = field(default_factory=list)
    loop_number: int = -1  # of the reference's layouts, the one that proves the loop
    numerics_number: int | None = None  # and the one that measures the numerics, where they are inexact

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.launcher}"

    @property
    def title(self) -> str:
        """The engine and the settings that it was given."""
        return " ".join([self.engine, *(f"{key}={value}" for key, value in self.facts.get("chosen", {}).items())])

    @property
    def open(self) -> bool:
        """Not yet judged, or judged good: worth another launch."""
        return self.verdict.verdict in ("", "same", "approximate")


def rows_of(study: Study, found: Mapping[str, Any], *, forks: bool = False) -> list[Row]:
    """The rows of a study; those that cannot run here have their verdict already. Raises UserError for bad names.

    forks: whether ranks may be forked where nobody has named a launcher.
    """
    known = {facts["name"]: facts for facts in found["engines"]}
    for name in study.engines:
        if name not in known:
            raise UserError(f"there is no engine '{name}'; {nearest(name, list(known))}")
    chosen = study.engines or tuple(known)
    if study.rounds and "single" not in chosen:
        chosen = ("single", *chosen)  # what the others' speed is compared with
    rows = []
    for name in dict.fromkeys(chosen):
        for launcher in _launchers(study, known[name], forks):
            verdict = _verdict_before(known[name], found["job"], launcher, study.machines)
            rows.append(Row(name, launcher, known[name], verdict))
    started = {row.launcher for row in rows}
    if study.engines and study.launchers and "all" not in study.launchers and not started & {*study.launchers, "-"}:
        starts = "; ".join(
            f"{name} starts as {' or '.join(launch.able(known[name]['process_kind']))}" for name in study.engines
        )
        raise UserError(f"--launchers {','.join(study.launchers)} starts none of the engines asked for: {starts}")
    return sorted(rows, key=lambda row: row.engine != "single")


def _launchers(study: Study, facts: Mapping[str, Any], forks: bool) -> list[str]:
    able = launch.able(facts["process_kind"]) or ["-"]
    if study.launchers == ("fork",) or (forks and not study.launchers):
        return ["fork"] if _may_fork(study, facts) else able[:1]
    if "all" in study.launchers:
        return able
    for name in study.launchers:
        launch.load(name)
    return [name for name in able if name in study.launchers] or able[:1]


def _may_fork(study: Study, facts: Mapping[str, Any]) -> bool:
    """Whether an engine's ranks may be forked: on the CPU of one machine, where it needs no launcher of its own."""
    here = study.machines.nnodes == 1 and not study.machines.port and fork_client.is_possible()
    return (
        here
        and facts["available"]
        and facts["devices"][0] == "cpu"
        and facts["process_kind"] in launch.load(launch.FORK).STARTS
    )


def _verdict_before(
    facts: Mapping[str, Any], job: Mapping[str, Any], launcher: str, machines: launch.Machines
) -> Verdict:
    absent = None if facts["available"] else facts["reason"]
    absent = absent or launch.load(launcher).missing(machines, os.environ)
    if absent:
        return Verdict("unavailable", reason=absent)
    refused = refusal(facts, job)
    return Verdict("refused", reason=refused) if refused else Verdict("")


def refusal(facts: Mapping[str, Any], job: Mapping[str, Any]) -> str | None:
    """Why an engine cannot train a job that its inspection has looked at, or None."""
    layout = facts["layout"]
    if layout["every_gradient"] and job["unused"]:
        names = first_few(job["unused"])
        setting = ", or --set-engine find_unused=true" if "find_unused" in facts["settings"] else ""
        return (
            f"{names}: no gradient, which {facts['name']} cannot train with; "
            f"freeze such parameters, leave them out of the model{setting}"
        )
    if layout["no_scalars"] and job["scalars"]:
        names = first_few(job["scalars"])
        return f"{facts['name']} takes no scalar parameter: {names}; make it of shape [1], as in torch.ones(1)"
    if job["sync_batchnorm"] and job["batch_layers"] and layout["replicas"] > 1:
        if layout["lone_batchnorm"]:
            return (
                f"SyncBatchNorm does not find the other ranks of {facts['name']}; use ddp, or leave sync_batchnorm out"
            )
        if facts["devices"][0] == "cpu":
            return "torch's SyncBatchNorm runs on GPUs alone; leave sync_batchnorm out where there are none"
    refused: str | None = job["refused"][str(layout["replicas"])]
    return refused


def check_devices(nproc: int, found: Mapping[str, Any], engines: tuple[str, ...] = ()) -> None:
    """Raises UserError when a rank would have no GPU of its own."""
    devices = found["devices"]
    wanted = [facts for facts in found["engines"] if not engines or facts["name"] in engines]
    if devices[0] != "cpu" and nproc > len(devices) and any(facts["process_kind"] != "one" for facts in wanted):
        raise UserError(
            f"--nproc {nproc} needs {nproc} GPUs, one for each rank, and this machine has {len(devices)}; "
            f"use --nproc {len(devices)}, or --device cpu to try it without"
        )
