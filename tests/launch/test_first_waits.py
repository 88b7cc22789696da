"""Who is absent while ranks, machines or a process with a store wait for others, before any training begins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from budget import budget, wait_until
from command import samestep
from lane_marks import CHECK, FULL
from said import says, tells
from samestep.launch.first_waits import FirstWaits, Found, explain, look, may_yet_come
from samestep.launch.hung_rank import named
from samestep.launch.rank_exits import RankExits, last_words
from samestep.message import message
from samestep.records.files import write
from samestep.records.rank_ends import WAIT, Wait

MEETS = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
print("met", flush=True)
"""
PORT = "PORT=$(python -c 'import socket; s = socket.socket(); s.bind((\"127.0.0.1\", 0)); print(s.getsockname()[1])')"


def rank(number: int, size: int = 3, **more: object) -> Wait:
    return Wait("rank", 100 + number, 0.0, "init_process_group", number=number, size=size, **more)  # type: ignore[arg-type]


def test_a_rank_that_nobody_has_started_is_named() -> None:
    hang = explain([rank(0), rank(1)], 9.0)
    assert hang.ranks == (2,)
    says(hang.message, "ranks_never_came", ranks=[0, 1], absent=[2], size=3, started=[], unreached=None)


def test_a_world_size_beyond_what_the_launcher_has_started_is_told() -> None:
    hang = explain([rank(number, local=[0, 1], launched=2) for number in (0, 1)], 9.0)
    says(hang.message, "ranks_never_came", absent=[2], launched=2)


def test_ranks_of_other_machines_are_not_called_absent_here() -> None:
    hang = explain([rank(number, 4, local=[0, 1], launched=4) for number in (0, 1)], 9.0)
    assert hang.ranks == ()
    says(hang.message, "ranks_of_other_machines_have_not_come", absent=[2, 3])


def test_a_rank_that_was_started_may_yet_come() -> None:
    found = Found({2: 812}, frozenset())
    hang = explain([rank(0), rank(1)], 9.0, found)
    says(hang.message, "ranks_never_came", started=[2], processes=[812])
    assert may_yet_come(hang, found)
    assert not may_yet_come(explain([rank(0)], 9.0, found), found)


def test_why_an_absent_rank_has_left_is_told() -> None:
    why = message("rank_called_exit", code="1", line="train.py:9, load", caught=None)
    says(explain([rank(0, 2)], 9.0, left={1: why}).message, "ranks_never_came", gone=1, why=why)


def test_ranks_that_have_all_come_and_meet_at_other_places() -> None:
    two = [rank(0, 2, endpoint="a:1"), rank(1, 2, endpoint="a:2")]
    says(explain(two, 9.0).message, "all_ranks_wait_to_meet", endpoints=["a:1", "a:2"])


def test_machines_that_have_come_are_counted() -> None:
    wait = Wait("machine", 7, 0.0, "torchrun", size=2, hosts=["h1"], endpoint="h1:29500")
    says(explain([wait, rank(0)], 9.0).message, "machines_have_not_come", size=2, came=1, unreached=None)
    says(explain([wait], 9.0, Found({}, frozenset({7}))).message, "machines_have_not_come", unreached="h1:29500")


def test_a_wait_lasts_as_long_as_it_was_watched(tmp_path: Path) -> None:
    """Not by the times of two clocks: a machine that was suspended is no hang."""
    waits, own = FirstWaits(tmp_path), Wait("store", os.getpid(), 5.0, "Store.get('x')", endpoint="127.0.0.1:1")
    write(tmp_path / WAIT.format(own.pid), own)
    assert waits.update(0.5) == [own] and waits.longest_s(waits.update(0.5)) == 1.0
    assert look([own]).unreached == {own.pid}
    write(tmp_path / WAIT.format(2**22 + 1), Wait("rank", 2**22 + 1, 5.0, "init_process_group", size=2))
    assert waits.update(0.5) == [own] and len(waits.all()) == 2 and not waits.go_on()  # the other has ended in its wait


def test_how_a_process_has_ended_is_read_before_its_parent_waits(tmp_path: Path) -> None:
    exits, said = RankExits(), tmp_path / "stderr"
    with said.open("w") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import os, sys; input(); print('  what():  two sizes', file=sys.stderr); os.abort()",
            ],
            stdin=subprocess.PIPE,
            stderr=output,
        )
    exits.add(process.pid)
    process.stdin.write(b"\n")
    process.stdin.close()
    wait_until(lambda: process.pid in exits.ended_at, "its end is not noticed")
    assert exits.code_of[process.pid] == -signal.SIGABRT
    assert last_words(exits.output_of[process.pid]) == "two sizes"
    assert last_words(None) is None
    process.wait()


@pytest.mark.parametrize(
    ("ranks", "port", "says_of", "absent"),
    [
        pytest.param("0 1", PORT, [0, 1], [2], marks=CHECK),
        pytest.param("1", "PORT=9", [1], [0, 2], marks=FULL),
    ],
)
def test_a_rank_that_never_comes_is_named(
    ranks: str, port: str, says_of: list[int], absent: list[int], tmp_path: Path
) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    each = "RANK=$rank WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=$PORT"
    line = f"{port}; for rank in {ranks}; do {each} {sys.executable} meets.py & done; wait"
    options = ["--out", "out", "--stall", f"{budget(2):g}", "--end-hung"]
    done = samestep("monitor", *options, "--", "bash", "-c", line, out=None, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if " in init_process_group for " in line]
    assert told.startswith(f"samestep: {named(says_of)} ha") and f"size is 3, and {named(absent)} never came" in told
    assert "at meets.py:4, <module>" in told
    assert ("nobody answers at 127.0.0.1:9" in done.stderr) == (port == "PORT=9"), done.stderr
    assert "SIGKILL" not in done.stderr and "ended first" not in done.stderr


@pytest.mark.check
def test_a_machine_that_never_comes_is_told(tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "meets.py"]
    options = ["--out", "out", "--stall", f"{budget(2):g}", "--end-hung"]
    done = samestep("monitor", *options, "--", *launch, out=None, cwd=tmp_path)
    assert "at localhost:0: this is one of 2 machines, and 1 has come (" in done.stderr, done.stderr
    assert "nobody answers" not in done.stderr
    assert tells(done.stderr, "no_rank_was_seen", attached=1), done.stderr


@pytest.mark.check
def test_ranks_that_meet_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "meets.py"]
    options = ["--out", "out", "--stall", f"{budget(2):g}", "--end-hung"]
    done = samestep("monitor", *options, "--", *launch, out=None, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if line.startswith("samestep: ")]
    assert done.returncode == 0 and [line.split()[1] for line in said] == ["used", "the", "samples:"], done.stderr
    assert not [*(tmp_path / "out" / "ranks").glob("wait-*")]
