"""samestep collectives: what it prints and keeps, what it refuses, and its launchers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from budget import budget, deadline
from cluster import hosts as hosts_module
from cluster import skip_where
from cluster import slurm as slurm_module
from cluster.slurm import Slurm
from command import samestep
from lane_marks import CHECK, FULL
from samestep.commands.collectives import failed
from samestep.commands.command_options import CollectivesOptions, size_of
from samestep.errors import UserError
from samestep.message import message
from samestep.records.collectives import COLLECTIVES, Case, CollectiveRank, CollectiveResults, RankValues
from samestep.records.files import read
from samestep.report.language import text

SMALL = (
    "--op",
    "all_reduce,send_recv,barrier",
    "--dtype",
    "float32",
    "--sizes",
    "1KiB,64KiB,1MiB",
    "--seconds",
    "0.01",
)
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SAMESTEP = [sys.executable, "-m", "samestep"]


def check(out: Path, size: int = 2) -> CollectiveResults:
    """The results in a folder, which are complete."""
    results = read(CollectiveResults, out / "results.json")
    assert (results.world_size, results.wrong, results.unmeasured) == (size, [], {})
    assert [curve.collective for curve in results.curves] == ["all_reduce", "send_recv", "barrier"]
    assert [point.size for point in results.curves[0].points] == [1 << 10, 1 << 16, 1 << 20]
    assert all(point.median > 0 for curve in results.curves for point in curve.points)
    assert (out / "report.html").read_text().count("<svg") == 2
    return results


def test_it_prints_a_table_and_keeps_typed_results(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = samestep("collectives", "--nproc", "2", "--launcher", "fork", *SMALL, *deadline(), out=out)
    assert done.returncode == 0, done.stderr
    results = check(out)
    # In the world all_reduce by five reductions; in four groups of one rank no send_recv; in the mesh's other dimension
    # all three.
    assert results.checked == 7 + 4 * 2 + 3
    assert text(message("collectives_right", checked=results.checked, backend="gloo", ranks=2), "en") in done.stdout
    assert "band, bor, bxor" in done.stdout
    table = done.stdout[done.stdout.index("collective ") :].splitlines()
    assert max(map(len, table)) <= 100
    assert [line.split()[0] for line in table[2:]] == ["all_reduce", "send_recv", "barrier"]


def test_show_prints_what_three_ranks_hold() -> None:
    done = samestep("collectives", "--show", "all_to_all_single", *deadline())
    assert done.returncode == 0, done.stderr
    assert "    dist.all_to_all_single(out, tensor, group=group)" in done.stdout
    of_rank_1 = "   1  tensor = [10, 11, 12, 13, 14, 15]  out = [2, 3, 12, 13, 22, 23]"
    assert of_rank_1 in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--op", "allreduce"], "there is no collective 'allreduce'; did you mean 'all_reduce'"),
        (["--show", "bcast"], "there is no collective 'bcast'"),
        (["--sizes", "1KiB:lots"], "--sizes 'lots': write a size as in 64, 1KiB or 16MiB"),
        (["--sizes", "1MiB:1KiB"], "the first is larger than the last"),
        (["--sizes", "1KiB,1000000GiB", "--nproc", "2"], "2 ranks hold 4e+06 GiB of a message of 1e+06 GiB, and this"),
        (["--dtype", "float31"], "--dtype float31: did you mean 'float32'"),
        (["--backend", "glow"], "--backend glow: did you mean 'gloo'"),
        (["--nproc", "1"], "a collective needs at least two ranks"),
        (["--backend", "mpi", "--launcher", "fork", "--nproc", "2"], "this torch is built without MPI"),
    ],
)
def test_bad_input_is_one_sentence(options: list[str], says: str, tmp_path: Path) -> None:
    done = samestep("collectives", *options, *deadline(), out=tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_sizes() -> None:
    assert CollectivesOptions(sizes="1KiB:16KiB").measured_sizes() == (1024, 4096, 16384)
    assert CollectivesOptions(sizes="1KiB:5000").measured_sizes() == (1024, 4096, 5000)
    assert CollectivesOptions(sizes="2MB,1.5KiB").measured_sizes() == (1536, 2_000_000)
    assert CollectivesOptions(sizes="0").measured_sizes() == ()
    with pytest.raises(UserError, match="write a size"):
        size_of("0")
    assert CollectivesOptions().chosen_collectives() == tuple(COLLECTIVES)


def test_a_collective_that_has_right_values_but_no_times_has_failed() -> None:
    def held(collective: str, dtype: str, error: str = "") -> RankValues:
        return RankValues(0, Case(collective, dtype, "", "world", (0, 1), 0), [], [], error=error)

    every = [held("gather", "float32"), held("reduce", "float32", "lacking"), held("scatter", "int8")]
    rank = CollectiveRank([*every, held("barrier", "")], unmeasured=dict.fromkeys(COLLECTIVES, "out of memory"))
    assert failed(rank, "float32") == ["barrier", "gather"]


def typed(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=budget(250), env=os.environ | ROOT)


@pytest.mark.parametrize(
    "launcher",
    [pytest.param("mpirun", marks=CHECK), *(pytest.param(name, marks=FULL) for name in ("torchrun", "spawn"))],
)
def test_launchers(launcher: str, tmp_path: Path) -> None:
    skip_where("mpirun is not installed" if launcher == "mpirun" and not shutil.which("mpirun") else None)
    line = ["collectives", "--nproc", "2", "--launcher", launcher, *SMALL, "--out", str(tmp_path / "out")]
    done = typed([*SAMESTEP, *line])
    assert done.returncode == 0, done.stderr
    assert check(tmp_path / "out").launcher == launcher


@pytest.mark.check
def test_inside_of_torchrun(tmp_path: Path) -> None:
    around = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "samestep"]
    done = typed([*around, "collectives", *SMALL, "--out", str(tmp_path / "out")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the right values") == 1
    check(tmp_path / "out")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    skip_where(slurm_module.missing())
    with Slurm() as cluster:
        yield cluster


@pytest.mark.parametrize("how", [pytest.param("srun", marks=CHECK), pytest.param("salloc", marks=FULL)])
def test_slurm(how: str, slurm: Slurm, tmp_path: Path) -> None:
    """Two nodes: each command one of srun's tasks, and one command that starts the tasks."""
    line = [*SAMESTEP, "collectives", *SMALL, "--out", str(tmp_path / "out")]
    around = ["srun", "-N2", "-n2"] if how == "srun" else ["salloc", "-N2"]
    done = slurm.run(*around, *line, *(["--launcher", "srun", "--nproc", "1"] if how == "salloc" else []))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the right values") == 1
    check(tmp_path / "out")


@pytest.mark.full
def test_a_shaped_link_is_measured_within_a_tenth(tmp_path: Path) -> None:
    """Two hosts that share no folder, and links of 100 Mbit/s. gloo's all_reduce reaches less: docs/collectives.md."""
    skip_where(hosts_module.missing())
    with hosts_module.Hosts(2) as hosts:
        hosts.shape("100mbit")
        line = ["collectives", "--nnodes", "2", "--nproc", "1", "--master-addr", "h0", "--op", "send_recv"]
        line += ["--dtype", "float32", "--sizes", "4MiB,8MiB", "--seconds", "1"]
        commands = [
            hosts.start(i, [*SAMESTEP, *line, "--node-rank", str(i), "--out", str(tmp_path / str(i))]) for i in range(2)
        ]
        assert [command.wait(budget(150)) for command in commands] == [0, 0]
    results = json.loads((tmp_path / "0" / "results.json").read_text())
    (curve,) = results["curves"]
    assert 8 * curve["points"][-1]["bus_bandwidth"] == pytest.approx(100e6, rel=0.1)
    assert not (tmp_path / "1" / "results.json").exists()
