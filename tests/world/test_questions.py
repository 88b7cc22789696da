"""A rank that is asked questions is as it is without: whatever it forks, closes, runs or ends by, and whoever asks.

Each script runs twice, alone and served. What it prints and how it ends is the same, and nothing is logged.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from budget import budget
from samestep.launch.stacks import ask as ask_by_signal
from samestep.launch.stacks import parse
from samestep.world.processes import STACKS as SIGNAL
from samestep.world.questions import COLLECTIVES, SPARE, STACKS, ask

ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
# A rank that answers, or does not, by its last argument; what follows is in the script's own words.
SERVED = """
import os, sys, time
from pathlib import Path
if sys.argv[1] == "served":
    from samestep.world import questions
    from samestep.world.processes import STACKS, write_stacks
    folder = Path(sys.argv[2])
    write_stacks(folder / "stacks", STACKS)
    questions.serve(folder, 0, {questions.COLLECTIVES: lambda: b"{}"})
def wait_to_be_asked():
    print("ready", flush=True)
    sys.stdin.readline()
"""
SCRIPTS = {
    "forks a child that ends as Python ends": """
for _ in range(3):
    child = os.fork()
    if child == 0:
        sys.exit(3)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
wait_to_be_asked()
""",
    "has a child that outlives it": """
if os.fork() == 0:
    os.close(0), os.close(1), os.close(2)
    time.sleep(0.3)
    sys.exit(0)
wait_to_be_asked()
""",
    "spawns": """
import subprocess
print(subprocess.run([sys.executable, "-c", "print(1 + 1)"], capture_output=True).stdout)
wait_to_be_asked()
""",
    "joins every thread": """
import threading
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print(threading.active_count())
wait_to_be_asked()
""",
    "closes all files": """
time.sleep(0.1)
os.closerange(3, 256)
own = [os.open("own", os.O_RDWR | os.O_CREAT) for _ in range(20)]
os.write(own[0], b"the script's own")
wait_to_be_asked()
os.fsync(own[0])
print(open("own").read())
""",
    "handles signals": """
import signal
signal.signal(signal.SIGALRM, lambda *_: print("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.05)
signal.pause()
print([number for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())])
wait_to_be_asked()
""",
    "becomes another program": """
wait_to_be_asked()
sys.stdout.flush()
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(0.2); print('another')"])
""",
    "leaves at once": """
wait_to_be_asked()
sys.stdout.flush()
os._exit(5)
""",
    "raises": """
wait_to_be_asked()
raise ValueError("the script's own")
""",
}
# Those that cannot answer after what they did.
SILENT = {"closes all files"}


def run(folder: Path, script: str, how: str, answer_s: float) -> tuple[int, str, str, list[bytes | None]]:
    """Runs a script; asks while it waits, and until it has ended. Returns its exit code, what it printed on stdout and
    stderr, and the answers to questions for stacks and collectives. answer_s: for each of these."""
    folder.mkdir()
    (folder / "script.py").write_text(SERVED + script)
    words = [sys.executable, "script.py", how, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdin and process.stdout
            printed = process.stdout.readline()
            while printed and not printed.endswith(b"ready\n"):
                printed += process.stdout.readline()
            answers = [ask(folder, 0, question, answer_s) for question in (STACKS, COLLECTIVES)]
            ask_by_signal([process.pid], folder / "stacks", SIGNAL)
            process.stdin.write(b"\n")
            process.stdin.flush()
            until = time.monotonic() + budget()
            while process.poll() is None and time.monotonic() < until:
                ask(folder, 0, COLLECTIVES, 0.01)
                ask_by_signal([process.pid], folder / "stacks", SIGNAL)
            out, error = process.communicate(timeout=budget())
            return process.returncode, (printed + out).decode(), error.decode(), answers
        finally:
            process.kill()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_unwatched(name: str, tmp_path: Path) -> None:
    answer_s = 0.3 if name in SILENT else budget()
    code, out, error, answers = run(tmp_path / "served", SCRIPTS[name], "served", answer_s)
    alone = run(tmp_path / "alone", SCRIPTS[name], "alone", answer_s)
    assert (code, out) == alone[:2]
    assert error.replace("served", "alone") == alone[2]
    assert alone[3] == [None, None]
    if name in SILENT:
        assert answers == [None, None]
    else:
        assert answers[1] == b"{}"
        main, *_ = parse((answers[0] or b"").decode())
        assert [frame.function for frame in main][:2] == ["wait_to_be_asked", "<module>"]


@pytest.mark.parametrize(
    ("limit", "most", "user", "room"),
    [
        ("NOFILE", 1024, None, True),
        ("NOFILE", SPARE // 2, None, False),
        ("AS", 1 << 40, None, False),
        ("DATA", 1 << 40, None, False),
        # Of root the kernel limits no threads.
        pytest.param("NPROC", 1, None, True, marks=ROOT),
        pytest.param("NPROC", SPARE + 50, 65534, True, marks=ROOT),
        pytest.param("NPROC", SPARE - 50, 65534, False, marks=ROOT),
    ],
)
def test_no_thread_is_begun_where_the_training_may_need_it(limit: str, most: int, user: int | None, room: bool) -> None:
    script = f"""
import os, resource
from samestep.world.questions import has_room
resource.setrlimit(resource.RLIMIT_{limit}, ({most}, {most}))
if {user}:
    os.setuid({user})
print(has_room())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=budget())
    assert done.stdout == f"{room}\n", done.stderr


def test_a_rank_that_ends_while_it_is_asked_ends_as_it_would(tmp_path: Path) -> None:
    """Many times: an answer that the interpreter's end interrupts would abort the process in a few of a hundred."""
    script = """
import os, sys, threading
from pathlib import Path
from samestep.world import questions
codes = set()
folder = Path(sys.argv[1])
for number in range(40):
    child = os.fork()
    if child == 0:
        questions.serve(folder, number, {questions.COLLECTIVES: lambda: bytes(1 << 16)})
        questions.ask(folder, number, questions.COLLECTIVES)
        sys.exit(7)
    asking = threading.Thread(target=lambda: [questions.ask(folder, number, questions.STACKS, 0) for _ in range(200)])
    asking.start()
    codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    asking.join()
print(codes)
"""
    words = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=budget())
    assert (done.stdout, done.stderr) == ("{7}\n", "")


AS_IT_ENDS = "libc = ctypes.CDLL(None); libc.on_exit(libc.sleep, None); print(flush=True); sys.exit(1)"
AS_ANOTHER = (
    "print(flush=True); os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1); exit(1)'])"
)


@pytest.mark.parametrize("then", [AS_IT_ENDS, AS_ANOTHER], ids=["ends", "becomes another program"])
@pytest.mark.parametrize("number", [SIGNAL, signal.SIGUSR1])
def test_a_signal_that_comes_too_late_ends_no_process(number: signal.Signals, then: str, tmp_path: Path) -> None:
    """faulthandler gives signals back long before a process has ended: sleep(1) stands for what libraries then do. Sent
    by hand: whoever asks looks first whether the process handles the signal, and may be late by a moment."""
    script = f"""
import ctypes, faulthandler, os, sys
from pathlib import Path
from samestep.world.processes import STACKS, write_stacks
if {number == SIGNAL}:
    write_stacks(Path(sys.argv[1], "stacks"), STACKS)
else:
    faulthandler.register({int(number)}, file=sys.stderr)
{then}
"""
    words = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout and process.stdout.readline()
        until = time.monotonic() + budget()
        while process.poll() is None and time.monotonic() < until:
            process.send_signal(number)
            time.sleep(0.001)
        process.kill()
    assert process.returncode == (1 if number == SIGNAL else -number)
