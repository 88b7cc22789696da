"""What a process tree uses is counted while it runs: also what children used that ended in the middle of the run."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from budget import budget
from samestep.world import process_tree
from samestep.world.process_tree import ProcessTree, TreeUse

BURN_S = 0.4
# Its child takes BURN_S of CPU time, and has ended when it prints; it lives on until its input ends.
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < {BURN_S}: pass"])
print(flush=True)
sys.stdin.read()
"""


def test_a_child_that_has_ended_counts_while_its_parent_goes_on() -> None:
    """Its counters are then with its parent, which nobody has waited for yet."""
    tree = ProcessTree()
    line = [sys.executable, "-S", "-c", PARENT]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout and parent.stdout.readline()
        used, alive = tree.use(), tree.pids()
        assert parent.pid in alive
        assert 0.97 * BURN_S <= used.cpu_s <= BURN_S + budget(1)  # two interpreters start, too
    ended = tree.use()
    assert used.cpu_s <= ended.cpu_s <= used.cpu_s + budget(1), "counted twice, once the parent has ended as well"
    assert parent.pid not in tree.pids()


def test_what_children_read_and_wrote_that_have_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ProcessTree()
    before = process_tree._rusage()
    ended = TreeUse(0, before.cpu_s + 3.0, 0, before.read + 512, before.written + 1024)
    monkeypatch.setattr(process_tree, "_rusage", lambda: ended)
    used = tree.use()
    assert (used.read, used.written, used.readable) == (512, 1024, True)
    assert used.cpu_s == pytest.approx(3.0)


def test_disk_counters_that_another_user_keeps_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    line = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(line, stdin=subprocess.PIPE) as child:
        tree = ProcessTree()
        assert tree.use().readable
        monkeypatch.setattr(psutil.Process, "io_counters", refused)
        used = tree.use()
        assert child.pid in tree.pids() and used.processes and not used.readable
