"""Several machines by the same line on each: hosts with their own networks, static and c10d, a link that is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which

import pytest
from everywhere import remote_shell

from budget import budget, wait_until
from cluster import hosts as hosts_module
from cluster import skip_where
from cluster.hosts import Hosts
from command import JOBS, has_begun
from lane_marks import FULL

pytestmark = pytest.mark.check

SAMESTEP = [sys.executable, "-m", "samestep"]
Line = Callable[[int], list[str]]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    skip_where(hosts_module.missing())
    with Hosts(2) as made:
        yield made


def everywhere(
    hosts: Hosts, line: Line, on: range = range(2), during: Callable[[], None] | None = None
) -> list[tuple[int, str]]:
    """Types `line(host)` on each host; returns their exit codes and all that they said. Ends them by pid."""
    typed = [
        hosts.start(i, [*SAMESTEP, *line(i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        for i in on
    ]
    try:
        if during:
            during()
        return [(command.wait(budget(100)), read(command)) for command in typed]
    finally:
        for command in typed:
            command.kill()
            command.wait()
        wait_until(lambda: not any(hosts.pids(i) for i in on), "something is left behind")


def read(command: subprocess.Popen[str]) -> str:
    assert command.stdout
    return command.stdout.read()


def train(out: Path, *more: str, master: str = "h0") -> list[str]:
    shape = ["--nnodes", "2", "--nproc", "1", "--master-addr", master, "--out", str(out)]
    return ["run", f"{JOBS}:quick", *shape, *more]


def by_number(out: Path, *more: str, master: str = "h0") -> Line:
    return lambda i: train(out, "--node-rank", str(i), *more, master=master)


@pytest.mark.parametrize("how", [pytest.param("static", marks=FULL), "c10d", "ipv6"])
def test_the_same_line_on_each(how: str, hosts: Hosts, tmp_path: Path) -> None:
    """The meeting listens at the master's address alone."""
    out = tmp_path / "out"
    listening: list[str] = []

    def look() -> None:
        listening.extend(
            wait_until(lambda: [at for at in hosts.listening(0) if at.endswith(":29511")], "nobody listens")
        )

    lines: dict[str, Line] = {
        "static": by_number(out, "--port", "29511"),
        "c10d": lambda i: train(out),
        "ipv6": by_number(out, master=hosts.address6(0)),
    }
    ended = everywhere(hosts, lines[how], during=look if how == "static" else None)
    assert listening == ([f"{hosts.address(0)}:29511"] if how == "static" else [])
    assert [code for code, _ in ended] == [0, 0], ended
    assert (out / "weights.safetensors").exists() and (out / "results.json").exists()
    assert "ranks: 8 steps" in ended[0][1] and "ddp on" not in ended[1][1]
    assert "the interface eth0" in ended[1][1]
    assert {path.name for path in out.glob("machine-*/rank*.log")} == {"rank0.log", "rank1.log"}


@FULL
def test_over_a_slow_link_it_is_the_same_step(hosts: Hosts, tmp_path: Path) -> None:
    """Proven together, in a folder that the machines share."""
    hosts.shape("100mbit")
    shape = ["--nnodes", "2", "--nproc", "1", "--master-addr", "h0", "--out", str(tmp_path / "out")]
    ended = everywhere(hosts, lambda i: ["verify", "digits", "--engines", "ddp,fsdp", *shape])
    assert [code for code, _ in ended] == [0, 0], ended
    assert ended[0][1].count("same step (bitwise)") == 2
    assert "in 2 launches" in ended[1][1]


@pytest.mark.parametrize("how", [pytest.param("static", marks=FULL), "c10d"])
def test_a_machine_that_does_not_come(how: str, hosts: Hosts, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = by_number(out, "--timeout", "5") if how == "static" else lambda i: train(out, "--timeout", "5")
    ((code, said),) = everywhere(hosts, line, on=range(1))
    assert code == 1
    assert "h0:29500 within 5" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("how", [pytest.param("static", marks=FULL), "c10d"])
def test_a_cut_link_ends_every_rank_and_names_the_lost_one(how: str, hosts: Hosts, tmp_path: Path) -> None:
    """Soon after the group's timeout no rank is left; torchrun's agent alone would stay for minutes."""
    out = tmp_path / "out"

    def cut() -> None:
        wait_until(lambda: has_begun(out / "machine-h0"), "it did not begin to train")
        hosts.cut(1)
        ranks = [out / f"machine-h{i}" for i in range(2)]
        wait_until(lambda: not any(map(ranks_of, ranks)), "ranks live on", lambda: [*map(ranks_of, ranks)], imports=30)

    more = ("--timeout", f"{budget(5):.0f}")
    shape = ["--nnodes", "2", "--nproc", "1", "--master-addr", "h0", "--out", str(out), *more]
    own: Line = (lambda i: ["--node-rank", str(i)]) if how == "static" else (lambda i: [])
    try:
        ended = everywhere(hosts, lambda i: ["run", f"{JOBS}:slow", *shape, *own(i)], during=cut)
    finally:
        hosts.mend(1)
    assert [code for code, _ in ended] == [1, 1], ended
    assert "rank 1 on" in ended[0][1], ended
    assert "rank 0 on" in ended[1][1], ended[1]


def ranks_of(folder: Path) -> list[int]:
    """The pids of a folder's ranks that live."""
    pids = [int(path.read_text().partition("@")[0]) for path in folder.glob("pid-rank*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in state_of(pid)]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_master_that_others_cannot_reach_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    ((code, said),) = everywhere(hosts, by_number(tmp_path / "out", master="localhost"), on=range(1))
    assert code == 2
    assert "no other machine" in said and "--master-addr 10.77.0.10" in said


def test_lines_that_differ_are_refused_and_what_differs_is_named(hosts: Hosts, tmp_path: Path) -> None:
    ended = everywhere(hosts, lambda i: [*by_number(tmp_path / "out")(i), "--set", f"max_steps={i + 1}"])
    assert [code for code, _ in ended] == [2, 2], ended
    says = "--set: max_steps=2 there, max_steps=1 on rank 0; run the same command on every machine"
    assert all(says in said for _, said in ended), ended


def test_proofs_that_differ_are_refused(hosts: Hosts, tmp_path: Path) -> None:
    shape = ["--nnodes", "2", "--nproc", "1", "--master-addr", "h0", "--out", str(tmp_path / "out")]
    shape += ["--timeout", f"{budget(5):.0f}"]
    ended = everywhere(hosts, lambda i: ["verify", "digits", "--engine", "ddp", "--set", f"lr=0.{i + 1}", *shape])
    assert "lr=0.2 here, lr=0.1" in ended[1][1], ended
    assert ended[1][0] == 2 and ended[0][0] == 1, ended


def test_two_machines_with_number_0(hosts: Hosts, tmp_path: Path) -> None:
    """The master is told, too: it does not wait its timeout for the number that the other lacks."""
    ended = everywhere(hosts, lambda i: by_number(tmp_path / "out")(0))
    assert [code for code, _ in ended] == [2, 2], ended
    assert "joined h0:29500" in ended[0][1], ended
    assert "--master-addr, h0" in ended[1][1], ended


@pytest.mark.full
def test_two_machines_with_one_number(hosts: Hosts, tmp_path: Path) -> None:
    """Both are told at once, and the first does not wait for the third."""
    shape = ["--nnodes", "3", "--nproc", "1", "--master-addr", "h0"]

    def line(i: int) -> list[str]:
        return ["run", f"{JOBS}:quick", *shape, "--node-rank", "0" if i == 0 else "1", "--out", str(tmp_path / str(i))]

    def come() -> None:
        typed = [*SAMESTEP, *line(2)]
        third = hosts.start(1, typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        late.append((third.wait(budget(60)), read(third)))

    late = list[tuple[int, str]]()
    ended = [*everywhere(hosts, line, during=come), *late]
    assert [code for code, _ in ended] == [2, 2, 2], ended
    assert all("with --node-rank 1" in said and "its own number" in said for _, said in ended), ended


def test_the_loop_interface_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    ended = everywhere(hosts, by_number(tmp_path / "out", "--interface", "lo"))
    assert [code for code, _ in ended] == [2, 2], ended
    assert all("--interface lo leads" in said for _, said in ended)


@pytest.mark.parametrize("how", [pytest.param("static", marks=FULL), pytest.param("c10d", marks=FULL)])
def test_a_machine_of_another_training_is_told_at_once(how: str, hosts: Hosts, tmp_path: Path) -> None:
    """On the port where two machines train already."""
    out, late = tmp_path / "out", list[tuple[int, str]]()
    shape = ["--nnodes", "2", "--nproc", "1", "--master-addr", "h0"]
    numbered: Line = (lambda i: ["--node-rank", str(i)]) if how == "static" else (lambda i: [])

    def come() -> None:
        wait_until(lambda: has_begun(out / "machine-h0"), "it did not begin to train")
        more = ["--out", str(tmp_path / "late"), *numbered(1)]
        typed = [*SAMESTEP, "run", f"{JOBS}:quick", *shape, *more]
        third = hosts.start(1, typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        late.append((third.wait(budget(60)), read(third)))

    line: Line = lambda i: ["run", f"{JOBS}:slow_for_a_while", *shape, "--out", str(out), *numbered(i)]  # noqa: E731
    ended = everywhere(hosts, line, during=come)
    assert [code for code, _ in ended] == [0, 0], ended
    says = "with --node-rank 1 already (h1, process" if how == "static" else "have joined h0:29500 already"
    assert late[0][0] == 2 and says in late[0][1], late


def test_mpirun_starts_on_other_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Open MPI reaches a host by a remote shell; here one that enters the host's network."""
    if which("mpirun") is None:
        assert "CI" not in os.environ, "Open MPI is not installed"
        pytest.skip("Open MPI is not installed (apt install openmpi-bin)")
    shell = remote_shell(hosts, tmp_path)
    out = tmp_path / "out"
    line = ["verify", "digits", "--engines", "ddp", "--launcher", "mpirun", "--hosts", "h0,h1", "--nproc", "1"]
    environment = os.environ | {"OMPI_MCA_plm_rsh_agent": str(shell)}
    command = hosts.start(
        0,
        [*SAMESTEP, *line, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        code = command.wait(budget(100))
    finally:
        command.kill()
    assert (code, said := read(command)) and code == 0, said
    assert "same step (bitwise)" in said
