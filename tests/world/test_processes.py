"""No process is waited for without a word: where it is is told, and a deadline ends it."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

import samestep
from budget import budget, wait_until
from samestep.errors import TrainingFailed
from samestep.launch import fork_client
from samestep.launch.stacks import handles, place_of
from samestep.message import message
from samestep.world.processes import _ends_by_itself, left_running, wait_for

SOURCE = Path(samestep.__file__).parent
# Files with a wait of another kind: why it needs no watch.
NO_PROCESS = {
    "data/pipeline.py": "threads of this process, whose heartbeat is watched",
    "data/loader.py": "a copy to a GPU",
    "rank/checkpoints.py": "the thread that writes a checkpoint, in a phase of its own of the heartbeat",
    "tasks/collectives/calls.py": "collectives, which have a timeout",
    "testing/same_training.py": "samestep check, which ends its ranks by itself",
    "launch/fork_client.py": "the method that wait_for calls",
    "rank/threaded_group.py": "ranks that are threads; the process that has started this one watches it",
}
# A guard that this process has told to end; what has ended already.
NO_WAIT = {"world/processes.py": "dismiss", "world/resources.py": "reap_orphans", "tasks/fork_server.py": "_serve"}
HANGS = """
import faulthandler, signal, time
def load():
    faulthandler.register(signal.SIGUSR1)
    time.sleep(1e6)
load()
"""


def waits(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The calls of a file that wait for a process with no timeout: the function that they are in, and the call."""
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
            text = ast.unparse(call.func)
            runs = text.startswith("subprocess.") and text != "subprocess.Popen"
            method = isinstance(call.func, ast.Attribute) and call.func.attr in ("wait", "communicate", "waitpid")
            bounded = any(node.arg == "timeout" for node in call.keywords) or (text.endswith(".wait") and call.args)
            if (runs or method) and not bounded:
                yield function.name, ast.unparse(call)


def test_every_wait_for_a_process_is_watched_or_has_a_timeout() -> None:
    unwatched = []
    for path in SOURCE.rglob("*.py"):
        file = path.relative_to(SOURCE).as_posix()
        if file in NO_PROCESS or file.startswith("tasks/eject/runtime/"):
            continue
        found = [wait for wait in waits(ast.parse(path.read_text())) if wait[0] != NO_WAIT.get(file)]
        unwatched += [f"{file}, {name}: {call}" for name, call in found]
    assert unwatched == []
    planted = "def f():\n    process.wait()\n    subprocess.run(['x'])\n    process.wait(3)\n    run.communicate()\n"
    assert len([*waits(ast.parse(planted))]) == 3


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process that hangs in a file of the user's, and the file for its stacks."""
    (tmp_path / "my_job.py").write_text(HANGS)
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([sys.executable, str(tmp_path / "my_job.py")], stderr=log)
    try:
        wait_until(lambda: handles(process.pid, signal.SIGUSR1), "it does not answer")
        yield process, tmp_path / "log"
    finally:
        process.kill()
        process.wait(budget())


def test_where_it_is_is_told_and_a_deadline_ends_it(
    hanging: tuple[subprocess.Popen[bytes], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    process, log = hanging
    what = message("torch_is_being_imported")
    with pytest.raises(TrainingFailed) as failed:
        wait_for(process, what, partial(place_of, process.pid, log), tell_s=0.2, deadline_s=1.2)
    over = failed.value.message
    assert over.id == "deadline_is_over" and over.fields["what"] == what
    assert over.fields["place"].fields["frame"] == "my_job.py:5, load"
    assert process.poll() == -signal.SIGKILL
    said = capsys.readouterr().err.splitlines()
    assert 1 <= len(said) <= 3 and all("my_job.py:5" in line for line in said)


def test_a_process_that_works_for_long_is_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys, time; time.sleep(0.5); sys.exit(3)"])
    assert wait_for(process, message("records_are_being_judged"), tell_s=0.1) == 3
    assert "still being judged" in capsys.readouterr().err
    assert wait_for(subprocess.Popen([sys.executable, "-c", ""]), message("records_are_being_judged")) == 0
    assert not capsys.readouterr().err


def test_a_fork_server_that_does_not_get_ready_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import of torch hangs, in a file that a folder of the search path holds."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(1e6)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv(fork_client.SOCKETS, raising=False)
    server = fork_client.ForkServer("ranks")
    try:
        wait_until(lambda: all(handles(pid, signal.SIGUSR1) for pid in server.pids), "it does not answer")
        with pytest.raises(TrainingFailed, match=r"torch\.py:2"):
            server.is_ready(0.1)
    finally:
        server.close()


def test_a_child_that_has_ended_and_waits_for_its_parent_is_not_left_running() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        assert child.pid in [process.pid for process in left_running()]
        assert child.stdin
        child.stdin.close()
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "the child lives")
        assert child.pid not in [process.pid for process in left_running()]


def test_a_child_that_is_becoming_another_program_is_left_running() -> None:
    """Linux shows no command line of it for a moment."""
    words = Path("/proc/self/cmdline").read_bytes()
    for _ in range(50):
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            os.read(reading, 1)
            try:
                os.execvp("sleep", ["sleep", "986"])
            finally:
                os._exit(127)
        child = psutil.Process(pid)
        os.write(writing, b"1")
        while Path(f"/proc/{pid}/cmdline").read_bytes() == words:
            pass
        try:
            assert not _ends_by_itself(child)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reading)
            os.close(writing)
