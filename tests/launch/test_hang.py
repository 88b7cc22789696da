"""A training that hangs is ended, and the rank and the line at fault are named; one that is slow is not."""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from budget import budget, deadline, wait_until
from cluster import hosts, skip_where
from command import TESTS, samestep
from lane_marks import CHECK, FULL, in_turn
from launch.clock import Clock
from samestep.launch import Machines, stacks, watchdog
from samestep.launch.hang import explain
from samestep.launch.hung_rank import Collective, HungProcess, HungRank, Recorded, recorded
from samestep.launch.stacks import Frame
from samestep.launch.watchdog import FIRST_S, LEAST_S, Pace
from samestep.message import Message, message
from samestep.world.heartbeat import (
    BACKWARD,
    BUILDING,
    EVALUATION,
    FORWARD,
    LOADING,
    NONE,
    TRAINING,
    Heartbeat,
    Pulse,
    file_of,
)
from samestep.world.imports import STANDARD

sys.path.insert(0, str(TESTS.parent / "benchmarks"))
import hangs

JOB = f"{TESTS}/launch/hanging.py:job"
QUICK = ("dataset",)  # without `make check`
SHAPES = "shapes"  # gloo ends the rank that receives too much
ON_ONE_MACHINE = [fault for fault in hangs.FAULTS if fault not in ("slow", SHAPES, *hangs.ON_HOSTS)]


def run(fault: str, out: Path, *more: str, nproc: int = 2) -> tuple[int, str]:
    arguments = ["run", JOB, "--set", f"fault={fault}", "--nproc", str(nproc), *deadline(), *more]
    done = samestep(*arguments, out=out, cwd=out.parent)  # the job leaves a file in its current folder
    return done.returncode, done.stderr


@pytest.mark.check
@pytest.mark.parametrize(
    "fault",
    [
        fault if fault in QUICK else pytest.param(fault, marks=in_turn(4, number))
        for number, fault in enumerate(ON_ONE_MACHINE)
    ],
)
def test_the_rank_and_the_line_that_hang_are_named(fault: str, tmp_path: Path) -> None:
    code, said = run(fault, tmp_path / "out", "--stall", f"{budget(1.5):g}", nproc=2 if fault in QUICK else 3)
    assert code == 1, said
    assert "samestep: rank 1 " in said
    assert any(f"hanging.py:{line}," in said for line in hangs.marked_lines(fault)), said
    report = (tmp_path / "out" / "hang.txt").read_text()
    assert "\nrank 0 (" in report and "\nrank 1 (" in report
    assert report.count("recent call first") >= 2
    assert list(hangs.alive_in(str(tmp_path))) == []


@pytest.mark.parametrize("fault", [pytest.param("far", marks=CHECK), pytest.param("link", marks=FULL)])
def test_a_hang_on_two_hosts_is_named(fault: str) -> None:
    skip_where(hosts.missing())
    options = argparse.Namespace(engine="ddp", stall=budget(3), deadline=budget(100))
    trial = hangs.trial(fault, options)
    assert trial.code == 1 and trial.right_rank and trial.right_line and not trial.left, trial


@pytest.mark.check
def test_a_shape_that_only_one_rank_has_is_said(tmp_path: Path) -> None:
    code, said = run(SHAPES, tmp_path / "out", "--stall", "60")
    assert code == 1
    assert "another size" in said
    assert any(f"hanging.py:{line}," in said for line in hangs.marked_lines(SHAPES)), said


def test_a_slow_rank_is_not_ended(tmp_path: Path) -> None:
    """The other rank waits for its slowest step, of 2 s, in a collective."""
    code, said = run("slow", tmp_path / "out", "--stall", f"{budget(20):g}")
    assert code == 0, said


@pytest.mark.check
def test_a_hang_is_named_before_the_timeout_of_collectives(tmp_path: Path) -> None:
    """Without it the other rank would report a lost one, with no sign of life."""
    code, said = run("model", tmp_path / "out", "--timeout", f"{budget(8):g}")
    assert code == 1
    assert "not entered" in said and "all_reduce" in said


@pytest.mark.parametrize("value", ["-1", "nan"])
def test_a_limit_that_is_none_is_refused(value: str, tmp_path: Path) -> None:
    done = samestep("run", "digits", "--stall", value, out=tmp_path / "out")
    assert done.returncode == 2
    assert "stall" in done.stderr


def rank(
    number: int,
    *,
    last: int = 7,
    waits: str = "",
    sizes: tuple[tuple[int, ...], ...] = ((4,),),
    frame: str = "",
    state: str = "S",
    pulse: Pulse | None = None,
) -> HungRank:
    """A rank that waits in the collective `waits`, its last one, and is at a line of `frame`."""
    wait = Collective("0", last, waits, sizes, 0, False)
    stack = ((Frame(f"/home/{frame}", 8, "f"),),) if frame else ()
    process = HungProcess(10 + number, state, threads=stack)
    known = Recorded({"0": last}, (wait,) if waits else ())
    return HungRank(number, process, pulse or Pulse(1, FORWARD, 3, 3, {}), 62.0, (), known, "b")


def test_the_rank_that_is_behind_is_at_fault() -> None:
    hang = explain([rank(0, waits="all_reduce"), rank(1, last=6, frame="my.py"), rank(2, waits="all_reduce")], 3)
    assert (hang.ranks, hang.message.id) == ((1,), "rank_has_not_entered_collective")
    fields = hang.message.fields
    assert (fields["ranks"], fields["waiting"], fields["collective"]) == ([1], [0, 2], "all_reduce #7")
    assert fields["silent_s"] == 62.0 and fields["second"] is None
    place = fields["first"].fields
    assert (place["rank"], place["host"], place["process"], place["worker"]) == (1, "b", 11, None)
    assert (place["frame"], place["activity"].id, place["step"]) == ("my.py:8, f", "rank_is_in_forward", 3)
    assert place["state"].id == "process_sleeps"


@pytest.mark.parametrize("state", ["S", "T"])
@pytest.mark.parametrize("count", [2, 4, 5])
def test_several_ranks_at_fault_are_named(count: int, state: str) -> None:
    culprits = [rank(number, last=6, state=state) for number in range(1, count + 1)]
    said = explain([rank(0, waits="all_reduce"), *culprits], 6).message
    assert said.id == ("rank_is_stopped" if state == "T" else "rank_has_not_entered_collective")
    assert (said.fields["ranks"], said.fields["waiting"]) == ([*range(1, count + 1)], [0])
    places = [said.fields[name] and said.fields[name].fields["rank"] for name in ("first", "second", "third")]
    assert places == [1, 2, 3 if count > 2 else None]


def test_of_two_ranks_that_are_behind_the_last_is_at_fault() -> None:
    two = [rank(0, waits="all_reduce"), rank(1, last=6, waits="all_gather"), rank(2, last=5)]
    assert explain(two, 3).ranks == (2,)


def test_of_different_collectives_the_rare_one_is_at_fault() -> None:
    three = [rank(0, waits="all_reduce"), rank(1, waits="barrier"), rank(2, waits="all_reduce")]
    assert explain(three, 3).ranks == (1,)
    sized = [rank(0, waits="all_reduce"), rank(1, waits="all_reduce"), rank(2, waits="all_reduce", sizes=((9,),))]
    assert explain(sized, 3).ranks == (2,)
    said = explain(sized, 3).message
    assert said.id == "ranks_wait_in_different_collectives"
    assert (said.fields["sizes"], said.fields["others_sizes"]) == (["[9]"], ["[4]"])
    assert explain(three, 3).message.fields["sizes"] is None


def test_of_two_different_collectives_the_one_in_the_users_code_is_at_fault() -> None:
    assert explain([rank(0, waits="all_reduce"), rank(1, waits="barrier", frame="my.py")], 2).ranks == (1,)
    both = [rank(0, waits="barrier", frame="my.py"), rank(1, waits="all_reduce", frame="my.py")]
    assert explain(both, 2).ranks == (1,)  # where each is, the first rank's counts


def test_a_stopped_rank_is_at_fault_though_its_recorder_does_not_answer() -> None:
    stopped = rank(1, state="T")
    hang = explain([rank(0, waits="all_reduce"), stopped], 2)
    assert hang.ranks == (1,)
    assert hang.message.id == "rank_is_stopped"


def test_no_rank_of_this_machine_is_at_fault_where_all_wait_for_another() -> None:
    hang = explain([rank(0, waits="all_reduce"), rank(1, waits="all_reduce")], 4)
    assert hang.ranks == ()
    assert hang.message.id == "ranks_wait_for_another_machine"


def test_without_collectives_the_rank_that_is_earlier_in_its_step_is_at_fault() -> None:
    """As under Horovod, whose collectives are not torch's."""
    late = rank(1, pulse=Pulse(1, LOADING, 3, 3, {}), frame="my.py")
    assert explain([rank(0, pulse=Pulse(1, BACKWARD, 3, 3, {})), late], 2).ranks == (1,)


def test_a_row_is_named_with_the_loader_worker_that_reads_it() -> None:
    main, worker = HungProcess(5, "S"), HungProcess(6, "S", "", 400, ((Frame("/home/my.py", 88, "load"),),))
    hung = HungRank(0, main, Pulse(1, LOADING, 17, 17, {6: 400}), 62.0, (worker,))
    place = hung.place.fields
    assert (place["process"], place["worker"], place["frame"], place["step"]) == (5, 6, "my.py:88, load", 17)
    assert place["activity"] == message("reading_row", row=400)


def test_a_worker_is_named_while_the_next_epoch_waits_for_it() -> None:
    """Persistent workers are asked before the first batch, when the rank is in no phase of loading."""
    loader = Frame(f"/x/site-packages{stacks.LOADER_FILE}", 7, "_reset")
    worker = HungProcess(6, "S", "", NONE, ((Frame("/home/my.py", 88, "load"),),))
    for stack, at in (((loader, Frame("/home/my.py", 9, "main")), 6), ((Frame("/home/my.py", 9, "main"),), 5)):
        rank = HungRank(0, HungProcess(5, "S", threads=(stack,)), Pulse(1, TRAINING, 0, 0, {}), 62.0, (worker,))
        assert rank.at_work().pid == at


def test_stacks_are_read_with_the_main_thread_first() -> None:
    text = (
        "Thread 0x01 (most recent call first):\n"
        f'  File "{STANDARD}/threading.py", line 3 in wait\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/x/site-packages/torch/nn/linear.py", line 4 in forward\n'
        '  File "/home/my job.py", line 5 in forward\n'
    )
    main, other = stacks.parse(text)
    assert stacks.users_frame(main) == Frame("/home/my job.py", 5, "forward")
    assert stacks.users_frame(other) is None


STOPS = """
import faulthandler, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "w"), all_threads=True)
for _ in range(8):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
steps = 0
print(flush=True)
while True:
    signal.raise_signal(signal.SIGSTOP)
    steps += sum(range(1000))
"""


def test_the_line_of_a_stopped_process_is_that_at_which_it_stopped(tmp_path: Path) -> None:
    """Whichever of its threads takes the signal that asks for the stacks, and wakes it."""
    file = tmp_path / "stacks"
    (tmp_path / "stops.py").write_text(STOPS)
    with psutil.Popen([sys.executable, str(tmp_path / "stops.py"), str(file)], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            for _ in range(10):
                wait_until(lambda: stacks.state_of(process.pid) == "T", "it does not stop")
                main, *_ = stacks.parse(stacks.ask([process.pid], file))
                assert [frame.line for frame in main] == [9]
        finally:
            process.kill()


def test_a_trace_of_the_recorder_is_read() -> None:
    entry = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "input_sizes": [[4]]}
    entry |= {"time_created_ns": 5, "is_p2p": False}
    entries = [entry | {"collective_seq_id": number, "retired": number < 2} for number in (1, 2)]
    told = recorded(json.dumps({"entries": entries, "version": "2.10"}))
    waiting = (Collective("0", 2, "all_reduce", ((4,),), 5, False),)
    assert told == Recorded({"0": 2}, waiting, {("0", 1): 5, ("0", 2): 5})
    assert recorded("{}") == Recorded({}, ())


def test_a_job_that_is_built_for_long_is_told_of_and_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "time", clock := Clock())
    said: list[Message] = []
    monkeypatch.setattr(watchdog, "say", said.append)
    own = Heartbeat()
    own.open(file_of(tmp_path, 0))
    own.build()
    (tmp_path / "pid-rank0").write_text(f"{os.getpid()}@{socket.gethostname()}")
    watching = watchdog.Watchdog(tmp_path, 1, Machines(), None)
    for _ in range(600):
        clock.now += 2.0
        watching.check()
    assert [(told.id, told.fields["rank"]) for told in said] == [("rank_builds_for_long", 0)] * 5


@pytest.mark.parametrize(
    ("timeout_s", "first_took_s", "ends_after_s"),
    [(120.0, 0.2, 30.0), (120.0, 4.0, 80.0), (20.0, 4.0, 18.0), (120.0, None, 114.0)],
)
def test_a_thread_that_keeps_its_turn_in_the_first_step_is_not_waited_for_like_a_compilation(
    timeout_s: float, first_took_s: float | None, ends_after_s: float, tmp_path: Path
) -> None:
    watching = watchdog.Watchdog(tmp_path, 2, Machines(timeout_s=timeout_s), None, as_threads=True)
    first, second = Pace(), Pace()
    first.update(Pulse(1, FORWARD, 0, 0, {}), 0.0)
    if first_took_s is not None:
        first.update(Pulse(2, BACKWARD, 0, 0, {}), first_took_s)
    second.update(Pulse(1, FORWARD, 0, 0, {}), 0.0)
    ranks = {0: first, 1: second} if first_took_s is not None else {0: second}
    for rank in ranks.values():
        rank.silent_s = ends_after_s
    first.silent_s += 0.1  # it waits for the second
    assert not watching._keeps_its_turn(ranks)
    for rank in ranks.values():
        rank.silent_s += 0.5
    assert watching._keeps_its_turn(ranks)
    second.pulse = Pulse(2, BUILDING, NONE, 0, {})
    assert not watching._keeps_its_turn(ranks)  # it may read a large file


def test_the_limit_follows_the_pace_of_the_training() -> None:
    slow = Pace()
    slow.update(Pulse(1, BUILDING, NONE, 0, {}), 0.2)
    assert slow.limit_s(None) == math.inf  # it may read a large file
    assert (slow.limit_s(5.0), slow.limit_s(100.0)) == (120.0, 500.0)
    for taken in range(40):
        slow.update(Pulse(2 + taken, LOADING, taken, taken, {}), 20.0)
        if not taken:
            assert slow.limit_s(None) == FIRST_S  # the first step may compile
        if taken == 1:
            assert slow.limit_s(None) == 200.0  # until there is another, the first one is the pace
    assert slow.limit_s(None) == pytest.approx(200.0)
    assert slow.limit_s(5.0) == 5.0
    slow.update(Pulse(99, EVALUATION, NONE, 39, {}), 20.0)
    assert slow.limit_s(None) == 600.0
    quick = Pace()
    for taken in range(9):
        quick.update(Pulse(1 + taken, LOADING, taken, taken, {}), 0.2)
    assert quick.limit_s(None) == LEAST_S
    quick.update(Pulse(9, LOADING, 8, 8, {}), 50.0)
    assert quick.silent_s == 50.0
