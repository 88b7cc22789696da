"""samestep monitor: what it counts of real process trees, what it passes through, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from budget import budget, wait_until
from command import samestep
from samestep.records.files import read
from samestep.records.monitor import (
    CSV,
    MOST_SAMPLES,
    PAGE,
    SUMMARY,
    MonitorSummary,
    Sample,
    header,
    read_samples,
    thinned,
)

PYTHON = sys.executable
BURN_S = 0.8
# Takes BURN_S of CPU time, however busy the machine is, and prints all that this process has taken.
BURN = f"""
import time
while time.process_time() < {BURN_S}: pass
print(time.process_time(), flush=True)
"""
# Waits until the monitor, whose usage.csv is the first argument, has taken a whole sample of what was before.
SAMPLED = """
import sys, time
from pathlib import Path
def samples(): return Path(sys.argv[1]).read_bytes().count(b"\\n")
enough = samples() + 2  # the next one may be half taken
while samples() < enough: time.sleep(0.02)
"""
# Runs BURN in a child of a child. Both have ended long before the next sample.
CHILD_OF_CHILD = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])",
                {BURN!r}])
"""
# Its parent ends at once: a process that nobody of the command waits for.
ORPHAN = f"""
import os, subprocess, sys, time
if os.fork() == 0:
    os.execv(sys.executable, [sys.executable, "-c", {BURN!r}])
os._exit(0)
"""
WAITS_FOR_ORPHAN = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ORPHAN!r}], stdout=subprocess.PIPE)"
# Its children's counters go nowhere: the parent never waits, and the kernel drops them.
IGNORES_CHILDREN = f"""
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {BURN + SAMPLED!r}, sys.argv[1]])
child.wait()
{SAMPLED}"""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # in which the kernel counts CPU time


def monitored(
    out: Path, *command: str, interval: float = 0.2
) -> tuple[subprocess.CompletedProcess[str], MonitorSummary]:
    done = samestep("monitor", "--interval", str(interval), "--out", str(out), "--", *command)
    assert (out / SUMMARY).exists(), done.stderr
    return done, read(MonitorSummary, out / SUMMARY)


def test_a_busy_loop_is_measured_and_its_files_are_whole(tmp_path: Path) -> None:
    done, summary = monitored(tmp_path / "out", PYTHON, "-c", BURN + "import sys; sys.exit(7)")
    assert done.returncode == 7
    taken = float(done.stdout)  # the command's own output, and nothing else
    assert taken - 2 * TICK_S <= summary.cpu_s <= taken + budget(0.2)  # its end comes on top of what it prints
    samples = read_samples(tmp_path / "out" / CSV)
    assert summary.exit_code == 7 and summary.samples == len(samples)
    assert samples[-1].cpu_s == pytest.approx(summary.cpu_s, abs=1e-3)
    assert summary.cores == pytest.approx(summary.cpu_s / summary.seconds)
    assert summary.machine_cores >= 0.9 * summary.cores
    for counter in ("seconds", "cpu_s", "read", "written", "machine_cpu_s", "received", "sent", "local"):
        values = [getattr(sample, counter) for sample in samples]
        assert values == sorted(values), counter
    page = (tmp_path / "out" / PAGE).read_text()
    assert "<svg" in page and "cores at work" in page and "exit code 7" in page


@pytest.mark.check
@pytest.mark.parametrize(
    ("program", "interval"),
    [(CHILD_OF_CHILD, 1000.0), (WAITS_FOR_ORPHAN, 1000.0), (IGNORES_CHILDREN, 0.1)],
    ids=["child of a child", "orphan", "child that nobody waits for"],
)
def test_what_ended_children_took_is_not_lost(program: str, interval: float, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done, summary = monitored(out, PYTHON, "-c", program, str(out / CSV), interval=interval)
    assert done.returncode == 0, done.stderr
    assert BURN_S - 2 * TICK_S <= summary.cpu_s <= BURN_S + budget(1)  # three interpreters start and end, too


def in_memory(path: Path) -> bool:
    """Whether a folder is on no disk, so that nothing is written to one."""
    mounts = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype in ("tmpfs", "ramfs", "overlay")


def test_memory_and_disk_are_seen(tmp_path: Path) -> None:
    size = 200 << 20
    hog = f"held = bytearray(b'x') * {size}\n{SAMPLED}"
    here = Path(__file__).parent  # tmp_path may be in memory
    writer = f"import os, tempfile; f = tempfile.TemporaryFile(dir={str(here)!r}); f.write(bytes(8 << 20)); f.flush()"
    writer += "; os.fsync(f)"
    run = "subprocess.run([sys.executable, '-c', code, sys.argv[1]])"
    program = f"import subprocess, sys\nfor code in ({writer!r}, {hog!r}): {run}"
    out = tmp_path / "out"
    _, summary = monitored(out, PYTHON, "-c", program, str(out / CSV), interval=0.1)
    assert size <= summary.memory <= 1.3 * size
    assert summary.processes == 2
    if not in_memory(here):
        assert 8 << 20 <= summary.written <= 16 << 20


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.check), (signal.SIGKILL, 137)]
)
def test_the_signal_that_ends_the_command_is_its_exit_code(number: int, code: int, tmp_path: Path) -> None:
    done, summary = monitored(tmp_path / "out", "sh", "-c", f"kill -{number} $$")
    assert done.returncode == code == summary.exit_code


TREE = """
import os, signal, subprocess, sys, time
def told(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(9)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, told)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
while True:
    time.sleep(0.05)  # a signal that comes just before a sleep is handled after it
"""


def begun(out: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A monitored command with a child in another session. Returns the monitor and the pids of both."""
    line = [PYTHON, "-m", "samestep", "monitor", "--out", str(out), "--", PYTHON, "-c", TREE]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout
    return process, [int(word) for word in process.stdout.readline().split()]


def all_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


SIGNALS = [signal.SIGUSR1, *(pytest.param(each, marks=pytest.mark.check) for each in (signal.SIGTERM, signal.SIGINT))]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_goes_to_the_command_and_nothing_is_left(number: signal.Signals, tmp_path: Path) -> None:
    process, pids = begun(tmp_path / "out")
    process.send_signal(number)
    output, errors = process.communicate(timeout=budget())
    assert output.strip() == f"got {number.name}"
    assert process.returncode == 9
    assert "ended 1 process" in errors
    assert all_gone(pids)
    assert read(MonitorSummary, tmp_path / "out" / SUMMARY).exit_code == 9


def test_a_killed_monitor_leaves_no_process(tmp_path: Path) -> None:
    process, pids = begun(tmp_path / "out")
    own = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    process.kill()
    process.communicate(timeout=budget())
    wait_until(lambda: all_gone([*pids, *own]), "processes are left")
    assert read_samples(tmp_path / "out" / CSV)  # until then


def test_ctrl_c_in_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    """In a pseudo-terminal: the live line is shown there, and the terminal itself signals the command."""
    main, other = os.openpty()
    code = (
        "import signal, sys, time\ncount = []\nsignal.signal(signal.SIGINT, lambda *_: count.append(1))\n"
        "print('ready', flush=True)\nend = time.time() + 1000\n"
        f"while not count and time.time() < end: time.sleep(0.05)\n{SAMPLED}\nsys.exit(40 + len(count))"
    )
    line = [
        PYTHON,
        "-m",
        "samestep",
        "monitor",
        "--interval",
        "0.1",
        "--out",
        str(tmp_path / "out"),
        PYTHON,
        "-c",
        code,
        str(tmp_path / "out" / CSV),
    ]
    start = "import os, sys, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    start += "os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [PYTHON, "-c", start, *line], stdin=other, stdout=other, stderr=other, env=os.environ | {"TERM": "xterm"}
    )
    os.close(other)
    seen = ""
    until = time.monotonic() + budget()
    sent = False
    try:
        while time.monotonic() < until:
            try:
                seen += os.read(main, 4096).decode(errors="replace")
            except OSError:  # it has ended
                break
            if not sent and "ready" in seen and "cores" in seen:
                os.write(main, b"\x03")
                sent = True
    finally:
        os.close(main)
    assert process.wait(timeout=budget()) == 41, seen
    assert "\x1b[r" in seen  # the terminal is whole again


def test_no_such_command_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    cases = [
        (["no-such-command"], "there is no command 'no-such-command' that can be executed"),
        ([str(tmp_path / "text")], "cannot be executed (Exec format error)"),
        (["--interval", "0", "true"], "--interval"),
    ]
    for words, sentence in cases:
        done = samestep("monitor", "--out", str(tmp_path / "out"), *words)
        assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = samestep("monitor", "--out", str(tmp_path / "text"), "true")
    assert done.returncode == 2 and "is a file" in done.stderr
    assert not (tmp_path / "out" / CSV).exists()
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / CSV).touch()
    done = samestep("monitor", "--out", str(tmp_path / "out"), "true")
    assert done.returncode == 2 and "would be replaced" in done.stderr


def test_an_argument_that_is_no_utf8_is_passed_on_and_shown_without(tmp_path: Path) -> None:
    line = [PYTHON, "-m", "samestep", "monitor", "--out", str(tmp_path / "out"), "--", "printf", b"\xff."]
    done = subprocess.run(line, capture_output=True, timeout=budget())
    assert (done.returncode, done.stdout) == (0, b"\xff."), done.stderr
    assert read(MonitorSummary, tmp_path / "out" / SUMMARY).command == ("printf", "\N{REPLACEMENT CHARACTER}.")
    assert (tmp_path / "out" / PAGE).exists()


def test_the_exit_code_passes_through_where_stderr_is_closed(tmp_path: Path) -> None:
    line = f"{PYTHON} -m samestep monitor --out {tmp_path}/out -- sh -c 'exit 6' 2>&-"
    done = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, timeout=budget())
    assert (done.returncode, done.stdout) == (6, b"")


def test_an_interval_without_end_looks_at_the_beginning_and_the_end(tmp_path: Path) -> None:
    done, summary = monitored(tmp_path / "out", "sleep", "0.1", interval=1e9)
    assert done.returncode == 0 and summary.samples == 2
    assert "its memory was" in done.stderr


def test_a_gpus_columns_are_read_as_they_are_written(tmp_path: Path) -> None:
    import csv

    from samestep.records.monitor import row
    from samestep.world.nvidia import GpuUse

    gpus = (GpuUse(0.5, 1 << 30, 1 << 20, 250.5, 61.0), GpuUse(None, None, None, None, None))
    samples = [Sample(float(i), 2, i * 0.5, 100, 1, 2, i * 1.5, 1000, 3, 4, 5, gpus) for i in range(3)]
    with open(tmp_path / CSV, "w", newline="") as file:
        csv.writer(file).writerows([header(2), *map(row, samples), [1, 2]])  # the last line is cut off
    assert read_samples(tmp_path / CSV) == samples


@pytest.mark.parametrize("count", [1, MOST_SAMPLES, MOST_SAMPLES + 1, 3 * MOST_SAMPLES, 3 * MOST_SAMPLES + 1])
def test_a_long_runs_plot_has_few_samples_from_the_first_to_the_last(count: int) -> None:
    samples = [Sample(float(i), i % 7, float(i), i, i, i, float(i), 0, i, i, i) for i in range(count)]
    found = thinned(samples)
    assert len(found) <= MOST_SAMPLES and (found[0], found[-1].seconds) == (samples[0], samples[-1].seconds)
    assert [each.seconds for each in found] == sorted({each.seconds for each in found})
    assert max(each.processes for each in found) == max(each.processes for each in samples)


def test_a_signal_that_the_command_was_to_ignore_is_ignored(tmp_path: Path) -> None:
    program = (
        "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGTERM); print('alive')"
    )
    words = [PYTHON, "-m", "samestep", "monitor", "--out", "out", "--", PYTHON, "-c", program]

    def ignore() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    done = subprocess.run(words, cwd=tmp_path, preexec_fn=ignore, capture_output=True, text=True, timeout=budget())
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_signal_of_the_command_to_its_own_group_comes_once(tmp_path: Path) -> None:
    """The monitor is of that group, too."""
    program = """
import os, signal, time
came = []
signal.signal(signal.SIGUSR1, lambda *_: came.append(1))
os.kill(0, signal.SIGUSR1)
time.sleep(1)
print(len(came))
"""
    words = [PYTHON, "-m", "samestep", "monitor", "--out", "out", "--", PYTHON, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, start_new_session=True, capture_output=True, text=True, timeout=budget())
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
