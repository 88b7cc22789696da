"""samestep monitor in front of a training that nobody has edited: which rank and which line it names, and when none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest

from budget import budget, wait_until
from command import samestep
from lane_marks import CHECK, FULL, in_turn
from said import says, tells
from samestep.launch import monitored_ranks, rank_meter, stacks
from samestep.launch.rank_meter import RankMeter, memory_of
from samestep.message import message
from samestep.records.files import write
from samestep.records.record import RankError
from samestep.world.heartbeat import TRAINING, Pulse

SCRIPT = Path(__file__).with_name("monitored.py")
BESIDE = SCRIPT.with_name("beside.py")
HANGS = {
    "sleep": "rank 1 has not entered all_reduce ",
    "loop": "rank 1 has not entered all_reduce ",
    "lock": "rank 1 has not entered all_reduce ",
    "dataset": "rank 1 has not entered all_reduce ",
    "worker": "rank 1 has not entered all_reduce ",
    "stop": "rank 1 is stopped",
    "early": "rank 1 has not entered all_reduce ",
    "branch": "rank 1 has waited for ",
}


def lines_of(fault: str) -> list[int]:
    """The lines of the script that must be named for a fault."""
    lines = enumerate(SCRIPT.read_text().splitlines(), 1)
    return [number for number, line in lines if fault in line.partition("# at: ")[2].split(", ")]


def monitored(
    fault: str, folder: Path, *options: str, steps: int = 12, step_s: float = 0.0, nproc: int = 2
) -> subprocess.CompletedProcess[str]:
    """Runs the script with a fault under the monitor, by torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    launch += [str(SCRIPT), fault, str(steps), str(step_s)]
    return samestep("monitor", *options, "--", *launch, out=None, cwd=folder)


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=in_turn(4, number)) for number, fault in enumerate(HANGS)])
def test_the_rank_that_hangs_and_its_line_are_named(fault: str, tmp_path: Path) -> None:
    options = ["--out", "out", "--stall", f"{budget(2):g}", "--end-hung"]
    done = monitored(fault, tmp_path, *options)
    assert done.returncode == 1, done.stderr
    assert f"samestep: {HANGS[fault]}" in done.stderr
    lines = lines_of(fault) if fault != "early" else []
    assert all(f"monitored.py:{line}, " in done.stderr for line in lines), done.stderr
    report = (tmp_path / "out" / "hang.txt").read_text()
    assert "\nrank 0 (" in report and "\nrank 1 (" in report


@pytest.mark.check
def test_a_healthy_training_is_passed_over(tmp_path: Path) -> None:
    done = monitored("none", tmp_path, "--out", "out", "--stall", f"{budget(2):g}", "--end-hung")
    said = [line for line in done.stderr.splitlines() if line.startswith("samestep: ")]
    assert done.returncode == 0 and done.stdout.count("is done") == 2, done.stderr
    assert [line.split()[1] for line in said] == ["used", "the", "samples:"], said


@pytest.mark.check
def test_a_long_evaluation_is_no_hang(tmp_path: Path) -> None:
    """It has no batches and steps of its own, and is told from a hang by its work."""
    done = monitored("evaluation", tmp_path, "--out", "out")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out" / "hang.txt").exists()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        pytest.param("error", "rank 1 failed first: ValueError: a wrong row, at monitored.py:", marks=CHECK),
        pytest.param(
            "unready", "rank 1 failed first: ValueError: no data, at monitored.py:", marks=FULL
        ),  # before its process group
        pytest.param("kill", "rank 1 ended first, after 6 optimizer steps, without an exception", marks=CHECK),
    ],
)
def test_the_first_failure_comes_first(fault: str, says: str, tmp_path: Path) -> None:
    done = monitored(fault, tmp_path, "--out", "out")
    assert done.returncode == 1
    assert f"samestep: {says}" in done.stderr


@pytest.mark.check
def test_an_exception_that_a_rank_has_caught_before_it_leaves_is_named(tmp_path: Path) -> None:
    done = monitored("load", tmp_path, "--out", "out")
    (line,) = lines_of("load")
    assert "rank 1 ended first, by itself, after 6 optimizer steps: sys.exit(0) at" in done.stderr, done.stderr
    assert "sys.exit(0) at monitored.py:" in done.stderr and f"monitored.py:{line}, fail" in done.stderr, done.stderr


@pytest.mark.check
def test_what_gloo_says_of_data_of_another_size_is_told(tmp_path: Path) -> None:
    """It ends the rank that receives too much, whose standard error is a file here."""
    launch = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {SCRIPT} sizes 12 2> said"
    done = samestep("monitor", "--out", "out", "--", "bash", "-c", launch, out=None, cwd=tmp_path)
    assert "ended first, after 6 optimizer steps, without an exception" in done.stderr, done.stderr
    assert "Received data size doesn't match expected size" in done.stderr and "SIGKILL" not in done.stderr


def test_a_rank_that_the_launcher_has_ended_did_not_end_first(tmp_path: Path) -> None:
    """The one that failed before it did, though it only says that it has lost another one."""
    watched, now = monitored_ranks.MonitoredRanks(tmp_path, None), time.time()
    why = message("exception_at_line", kind="RuntimeError", text="Connection closed by peer", line="train.py:3, main")
    write(tmp_path / "error-rank0.json", RankError(0, "crash", why, now, "", lost_peer=True))
    pulse = Pulse(9, TRAINING, 6, 6, {})
    for when, code, said in (
        (now + 1.0, -signal.SIGTERM, "only_lost_peers"),
        (now + 1.0, -signal.SIGABRT, "rank_was_ended_by_signal"),
        (now + 0.1, -signal.SIGKILL, "rank_was_ended_by_signal"),
    ):
        watched._left[0] = monitored_ranks._Departure(now + 0.5, 0, pulse, 1, 1)
        watched._left[1] = monitored_ranks._Departure(when, 1, pulse, 2, code)
        says(watched.first_failure(), said)
    watched.stopped_at = now  # by somebody's Ctrl-C
    says(watched.first_failure(), "only_lost_peers")


@pytest.mark.check
def test_an_exception_of_the_launcher_is_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a cluster sets RANK for the launcher itself: the number of the machine."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = monitored("kill", tmp_path, "--out", "out")
    assert "rank 1 ended first, after 6 optimizer steps, without an exception" in done.stderr, done.stderr


@pytest.mark.parametrize("start", [pytest.param("spawn", marks=CHECK), pytest.param("process", marks=FULL)])
def test_an_exception_that_a_function_of_a_process_raises_is_seen(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.multiprocessing.spawn, and a Process, catch it; what Python starts for them is not told as left running."""
    monkeypatch.setenv("START", start)
    done = samestep("monitor", "--out", "out", "--", sys.executable, str(SCRIPT), "error", out=None, cwd=tmp_path)
    line = next(number for number, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "# at: error" in text)
    why = message("exception_at_line", kind="ValueError", text="a wrong row", line=f"monitored.py:{line}, fail")
    assert tells(done.stderr, "first_error_of_rank", rank=1, why=why), done.stderr
    assert "had left running" not in done.stderr, done.stderr
    done = samestep("monitor", "--out", "none", "--", sys.executable, str(SCRIPT), "none", "12", out=None, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if line.startswith("samestep: ")]
    assert done.returncode == 0 and [line.split()[1] for line in said] == ["used", "the", "samples:"], done.stderr


def memory_judged(*looks: tuple[int, int]) -> tuple[int, int, int, int]:
    """What a meter compares after looks at (a rank's memory, that of its loader workers)."""
    meter, pulse = RankMeter(Path()), Pulse(1, TRAINING, 3, 3, {})
    for memory, workers in looks:
        look = rank_meter._Look(1, 0.0, pulse, 0.0, 0.0, memory, workers)
        meter._first.setdefault(0, look)
        meter._latest.setdefault(0, deque(maxlen=2))
        first, now = meter._memories(0, look)
    return first.memory, first.workers, now.memory, now.workers


def test_memory_that_has_grown_is_looked_at_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what goes on growing not at every look: a look costs more than it may."""
    memory = iter([100, 100, 400, 900, 900, 2000])

    def now(pid: int, pulse: Pulse) -> rank_meter._Look:
        return rank_meter._Look(pid, 0.0, pulse, 0.0, 0.0, next(memory), 0)

    monkeypatch.setattr(rank_meter._Look, "now", now)
    monkeypatch.setattr(rank_meter, "SHARE", 1e-9)
    meter, are_soon = RankMeter(Path()), []
    for _ in range(6):
        meter._due = 0.0
        assert meter.look_if_due({0: (1, Pulse(1, TRAINING, 3, 3, {}))})
        are_soon.append(meter._due - time.monotonic() <= rank_meter.LOOK_S)
    assert are_soon == [True, False, True, False, False, True]


def test_memory_is_compared_among_looks_that_had_loader_workers() -> None:
    assert memory_judged((9, 0), (10, 0), (11, 0)) == (9, 0, 10, 0)
    assert memory_judged((9, 0), (5, 4), (5, 6)) == (5, 4, 5, 4)
    assert memory_judged((5, 4), (5, 4), (9, 0), (9, 0)) == (5, 4, 5, 4)
    assert memory_judged((5, 4), (9, 0), (5, 9), (5, 9)) == (5, 4, 5, 9)
    # A moment's peak.
    assert memory_judged((5, 0), (50, 0), (5, 0)) == (5, 0, 5, 0)


@pytest.mark.parametrize(
    ("late", "other", "line", "looks"),
    [
        # Each rank sleeps at line 4, and the late one in a hook as well.
        ([4, 4, 9] * 10, [4, 4, 6] * 10, 9, (10, 0)),
        ([4] * 30, [4] * 30, 4, (30, 30)),  # both wait in one collective: by that none is late
        ([9] * 30, [4] * 30, 9, (30, 0)),
    ],
)
def test_the_line_of_a_late_rank_is_one_at_which_others_are_not(
    late: list[int], other: list[int], line: int, looks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {1: iter(other), 2: iter(late), 3: iter(())}
    meter, pulse = RankMeter(Path()), Pulse(1, TRAINING, 3, 3, {})
    monkeypatch.setattr(rank_meter.questions, "ask", lambda folder, rank, question: b"%d" % (rank + 1))
    monkeypatch.setattr(stacks, "parse", lambda pid: ((stacks.Frame("/job/train.py", next(lines[int(pid)]), "f"),),))
    meter._late_s = {0: 0.1, 1: 5.0, 2: 0.3}
    for rank in range(3):
        meter._first[rank] = look = rank_meter._Look(rank + 1, 0.0, pulse, 0.0, 0.0, 0, 0)
        meter._latest[rank] = deque([look], maxlen=2)
        meter._uses[rank] = meter._use(rank, look, look)
    monkeypatch.setattr(rank_meter, "APART_S", (0.0, 0.0))
    for _ in range(31):  # the last finds all looks done
        meter.look_at_stacks(1)
    _, use, _ = meter.uses()
    assert use.line == f"train.py:{line}, f"
    assert (use.looks, use.looks_at_line, use.others_at_line) == (30, *looks)


def test_work_is_told_from_rest() -> None:
    rest, more = monitored_ranks._Work(0), monitored_ranks._Work(0)
    more.at = rest.at + 10.0
    more.cpu_s = 10.0 * monitored_ranks.WORK_SHARE / 2
    assert not more.is_more_than(rest)
    more.cpu_s *= 4
    assert more.is_more_than(rest)
    more.cpu_s, more.io_bytes = 0.0, 2 * monitored_ranks.WORK_BYTES
    assert more.is_more_than(rest)


@pytest.mark.parametrize(
    ("fault", "says", "why"),
    [
        pytest.param("slow_compute", "rank 1 is slow: ", "it computes for ", marks=FULL),
        pytest.param("slow_data", "rank 1 is slow: ", "for data, and the others ", marks=CHECK),
        pytest.param("loader", "the training waits ", "num_workers=", marks=FULL),
        pytest.param("none", "", "", marks=CHECK),
    ],
)
def test_what_makes_the_training_slow_is_named(fault: str, says: str, why: str, tmp_path: Path) -> None:
    steps = {"slow_compute": 120, "none": 300}.get(fault, 200)
    done = monitored(fault, tmp_path, "--out", "out", steps=steps, step_s=0.04 if fault == "none" else 0.0)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(("samestep: rank", "samestep: the training"))]
    assert len(said) == bool(says) and all(says in line and why in line for line in said), done.stderr


def test_memory_that_a_worker_has_copied_is_its_own() -> None:
    """Pages that processes share count once in all; the resident set counts them in each."""
    held = bytearray(b"x") * (64 << 20)
    reader, writer = os.pipe()
    before = memory_of(os.getpid()).own
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        held[::4096] = bytes(len(held) // 4096)
        os.read(reader, 1)
        os._exit(0)
    shared = memory_of(child)
    os.write(writer, b"1")
    wait_until(lambda: memory_of(child).own > shared.own + (24 << 20), "the child has no pages of its own")
    assert shared.own < before
    assert memory_of(child).resident < shared.resident + (12 << 20)
    os.write(writer, b"2")
    os.waitpid(child, 0)


def test_what_a_healthy_script_does_beside_its_training_it_does_as_it_would(tmp_path: Path) -> None:
    """Nothing of ours is in its children's hands, or in its list of threads."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(BESIDE)]
    done = samestep("monitor", "--out", "out", "--", *launch, out=None, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has trained; what it started ended with [0, 0, 0, 0]") == 2, done.stdout
    assert "Worker server" not in done.stderr and "ended first" not in done.stderr
