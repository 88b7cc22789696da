"""Injects faults into this machine, and into hosts in network namespaces, and checks that the doctor names each.

    python tests/doctor/plant_faults.py --out results/doctor_…      (minutes; root, iproute2)

The faults are in faults/, by subject. Each is real: limits, control groups, mounts, environments, links that are
shaped and cut. InfiniBand's files and thermal counters are planted where there is no such hardware. Keeps a line for
each fault and for each healthy run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster.hosts import Hosts
from doctor.faults import environment, host, launch, network
from doctor.faults.fault import DOCTOR, Fault, clean
from doctor.faults.several_machines import between_hosts, doctors

FAULTS = (*host.FAULTS, *environment.FAULTS, *launch.FAULTS, *network.FAULTS)
ALARMS = ("WARN", "FAIL")


@dataclass(frozen=True)
class FaultRecord:
    """A line of the record. others: what else was an alarm, which a fault may well cause."""

    fault: str
    probe: str
    named: bool
    status: str
    why: str
    fix: str
    machines: int
    quick: bool
    seconds: float
    others: tuple[str, ...]


def plant(fault: Fault) -> FaultRecord:
    line = [*DOCTOR, *fault.options, *([] if fault.torch else ["--quick"])]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        variables = clean() | {"T": folder} | dict(fault.env)
        done = subprocess.run(["sh", "-c", fault.shell, "sh", *line], capture_output=True, text=True, env=variables)
    for group in ("cpu", "memory"):
        with suppress(OSError):
            Path(f"/sys/fs/cgroup/{group}/samestep-doctor").rmdir()
    took = time.monotonic() - began
    return record_of(fault, [done.stdout], took=took, errors=done.stderr)


def record_of(fault: Fault, printed: Sequence[str], *, took: float, machines: int = 1, errors: str = "") -> FaultRecord:
    """Looks for the finding in what the machines printed."""
    findings = []
    for text in printed:
        with suppress(ValueError):
            findings += json.loads(text[text.index("{") :])["findings"]
    alarms = [finding for finding in findings if finding["status"] in ALARMS]
    named = [
        alarm
        for alarm in alarms
        if (alarm["probe"], alarm["why"]["id"]) == (fault.probe, fault.finding) and fault.fixes in alarm["fix"]
    ]
    first = named[0] if named else {"status": "", "why": {"english": errors.strip()[-300:]}, "fix": ""}
    return FaultRecord(
        fault=fault.name,
        probe=fault.probe,
        named=bool(named),
        status=first["status"],
        why=first["why"]["english"],
        fix=first["fix"],
        machines=machines,
        quick=not fault.torch,
        seconds=round(took, 1),
        others=tuple(f"{alarm['probe']}: {alarm['why']['english']}" for alarm in alarms if alarm not in named),
    )


def healthy(number: int, quick: bool, machines: int) -> FaultRecord:
    began = time.monotonic()
    if machines == 1:
        line = [*DOCTOR, *(["--quick"] if quick else [])]
        printed = [subprocess.run(line, capture_output=True, text=True, env=clean()).stdout]
    else:
        with Hosts(machines) as hosts:
            printed = doctors(hosts, quick=quick)
    none = Fault(f"healthy {number}", "", "", torch=not quick)
    record = record_of(none, printed, took=time.monotonic() - began, machines=machines)
    reported = any('"findings"' in text for text in printed)
    return replace(record, named=reported and not record.others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="faults whose names have these words")
    parser.add_argument("--torch", choices=["with", "without", "alone"], default="with")
    parser.add_argument("--healthy", type=int, default=20)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    wanted = {"with": (True, False), "without": (True,), "alone": (False,)}[given.torch]

    def keep(row: FaultRecord) -> None:
        rows.append(row)
        with open(given.out / "trials.jsonl", "a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(
            "ok  " if row.named else "MISS",
            f"{row.seconds:6.1f} s",
            row.fault,
            "|",
            row.why[:150],
            *row.others,
            flush=True,
        )

    for fault in FAULTS:
        if given.only in fault.name and (not fault.torch) in wanted:
            keep(plant(fault))
    with tempfile.TemporaryDirectory() as folder:
        for name, probe, finding, fixes, quick, run in between_hosts(Path(folder)):
            if given.only in name and quick in wanted:
                began = time.monotonic()
                printed = run()
                took, fault = time.monotonic() - began, Fault(name, probe, finding, torch=not quick, fixes=fixes)
                keep(record_of(fault, printed, took=took, machines=len(printed)))
    for number in range(given.healthy):
        keep(healthy(number, wanted[-1], 2 if number % 5 == 4 else 1))
    missed = [row.fault for row in rows if not row.named]
    print(f"{len(rows) - len(missed)} of {len(rows)} as they should be", missed)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
