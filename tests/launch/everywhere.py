"""The same step under every launcher: one machine, two hosts, two Slurm nodes.

    python tests/launch/everywhere.py --out results/launchers_…      (minutes; root, Slurm, Open MPI, Horovod)

Proves `digits` in each place with two ranks, and keeps each results.json and one table.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster.hosts import Hosts
from cluster.slurm import Slurm

SAMESTEP = [sys.executable, "-m", "samestep", "verify", "digits"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for place, results in places(Path(folder)):
            shutil.copy(results, out / f"{place.replace(' ', '-')}.json")
            for row in json.loads(results.read_text())["engines"]:
                bitwise = " (bitwise)" if row["bitwise"] else ""
                rows.append(f"{place:<24}{row['launcher']:<12}{row['engine']:<10}{row['verdict']}{bitwise}")
    (out / "table.txt").write_text("\n".join(rows) + "\n")
    print("\n".join(rows))
    raise SystemExit(0 if all("same" in row for row in rows) else 1)


def places(folder: Path):  # type: ignore[no-untyped-def]
    """(where, its results.json), one after the other."""
    line = [*SAMESTEP, "--nproc", "2", "--out", f"{folder}/one"]
    subprocess.run([*line, "--engines", "ddp,horovod", "--launchers", "torchrun,spawn,mpirun,horovodrun"], check=True)
    yield "one machine", folder / "one" / "results.json"
    with Hosts(2) as hosts:
        for how in ("static", "c10d"):
            shape = ["--nnodes", "2", "--nproc", "1", "--master-addr", "h0", "--out", f"{folder}/{how}"]
            own = [["--node-rank", str(i)] if how == "static" else [] for i in range(2)]
            typed = [hosts.start(i, [*SAMESTEP, "--engines", "ddp,fsdp", *shape, *own[i]]) for i in range(2)]
            assert [command.wait(300) for command in typed] == [0, 0]
            yield f"two hosts {how}", folder / how / "results.json"
        shell = remote_shell(hosts, folder)
        mpirun = [*SAMESTEP, "--engines", "ddp", "--launcher", "mpirun", "--hosts", "h0,h1", "--nproc", "1"]
        typed = [
            hosts.start(0, [*mpirun, "--out", f"{folder}/mpi"], env=os.environ | {"OMPI_MCA_plm_rsh_agent": str(shell)})
        ]
        assert typed[0].wait(300) == 0
        yield "two hosts mpirun", folder / "mpi" / "results.json"
    with Slurm() as slurm:
        done = slurm.run(
            "salloc", "-N2", *SAMESTEP, "--engines", "ddp,fsdp", "--launcher", "srun", "--out", f"{folder}/slurm"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield "two Slurm nodes", folder / "slurm" / "results.json"


def remote_shell(hosts: Hosts, folder: Path) -> Path:
    """What mpirun calls to reach a host, as it would call ssh."""
    cases = "\n".join(
        f'h{i}) shift; exec {shlex.join(hosts.line(i, ["sh", "-c"]))} "$*" ;;' for i in range(hosts.count)
    )
    path = folder / "shell"
    path.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\n')
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    main()
